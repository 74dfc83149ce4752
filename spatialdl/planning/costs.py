"""What each part of a network costs one rank: operations, messages, memory.

The network runs forwards and backwards once, without data, as the rank of a grid with the largest
tile. A stage is a range of its parts, so one run gives the costs of all stages on this grid. After
a change of grid tiles may differ by a pixel from those that are counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spatialdl.channels.tensor import ChannelTensor, on_tile
from spatialdl.checking.preflight import dry_loss
from spatialdl.comm.allocator import MAPPED_FROM
from spatialdl.comm.dry import DryEvent, Talk, follow_events, record_talks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.own_tile import enter
from spatialdl.pipeline.steps import IMAGE, Recording, Value
from spatialdl.planning.ledger import Ledger, Phase, RankOperation, taken
from spatialdl.planning.parts import DividedStage, NetworkParts
from spatialdl.planning.peaks import Lives, lives
from spatialdl.planning.program import Program
from spatialdl.planning.tile import LargestTile, local
from spatialdl.planning.touches import Touches
from spatialdl.random import keyed


class Output(NamedTuple):
    """A value on its rank.

    Attributes:
        memory: its place in `NetworkCosts.lives`; -1 if it lies in what the run has not made.
        summed_in: the part that has made the memory in which its gradient is added up.
    """

    value: Value
    bytes: int
    memory: int
    summed_in: int


@dataclass
class LayerCosts:
    """One part of the network on one rank; memory in bytes.

    Attributes:
        forward, backward: operations in order.
        forward_talks, backward_talks: messages to the other ranks of its grid, and to those that
            divide its channels.
        outputs: what it gives to later parts.
        weights, buffers: of the part.
    """

    name: str
    forward: list[RankOperation] = field(default_factory=list)
    backward: list[RankOperation] = field(default_factory=list)
    forward_talks: list[Talk] = field(default_factory=list)
    backward_talks: list[Talk] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    weights: int = 0
    buffers: int = 0


@dataclass
class NetworkCosts:
    """The parts of a network in order.

    Attributes:
        input: bytes of the rank's tile of the images.
        loss: what is done after the last part; None if that was not reached.
        uses: parts that take a value, in order.
        lives: what was made, and when it lived.
        refused: why parts after those that are listed cannot work on this grid.
        touches: what a virtual tile does with memory; None where ranks have none.
        heap, mapped: on a CPU the same, with the memory alone that lies in the C library's heap, or
            is mapped by itself, see `spatialdl.comm.allocator`.
    """

    layers: list[LayerCosts]
    input: int
    loss: LayerCosts | None
    uses: dict[Value, list[int]]
    lives: Lives = field(compare=False)
    refused: str | None = None
    touches: Touches | None = field(default=None, compare=False)
    heap: NetworkCosts | None = None
    mapped: NetworkCosts | None = None

    @cached_property
    def values(self) -> dict[Value, int]:
        """Bytes of what parts give to later ones, and of the images."""
        given = {one.value: one.bytes for layer in self.layers for one in layer.outputs}
        return {IMAGE: self.input, **given}


class MemorySizes(NamedTuple):
    """Of memories, in bytes; half-open."""

    low: float
    high: float

    def hold(self, size: int) -> bool:
        return self.low <= size < self.high


def count(
    program: Program,
    shape: tuple[int, ...],
    grid: tuple[int, ...] = (1, 1),
    *,
    stream: tuple[int, ...] = (),
    uncut: bool = False,
    segments: bool = False,
    on_cpu: bool = True,
    divided: DividedStage | None = None,
) -> NetworkCosts:
    """Run a network on the ``meta`` device, forwards and backwards.

    Args:
        shape: (N, C, *spatial) of the images of a micro-batch of one replica, whole.
        grid: into which they are cut.
        stream: virtual tiles of a rank along each spatial dim; () for none. What is counted is one
            tile; messages, outputs and the input are those of all tiles of a rank.
        uncut: whether the network is run as it is, and not step by step.
        segments: whether it learns a class for every pixel.
        on_cpu: where convolutions need memory for themselves.
        divided: a stage of whose channels each rank has a part: its parts run alone.

    Raises:
        CannotRecord: if it does something else with so many samples than with others.
        UnsupportedSpatialOp: if channels cannot be divided.
    """
    parts = program.parts(uncut)
    recording = program.recording(shape[0]) if parts.is_recorded else None
    tile = LargestTile(shape, grid, stream)
    entering: Mapping[Value, Tensor] = {IMAGE: tile.image(parts.dtype)}
    if divided is not None:
        entering = program.entering(divided, uncut, grid, entering)
        parts = program.divided(divided, uncut, shape[0], entering)
    run = _Run(parts, recording, shape, tile, segments, on_cpu, entering)
    try:
        run.forward()
        run.backward()
        return run.result(on_cpu)
    finally:
        run.forget()


class _Run:
    def __init__(
        self,
        parts: NetworkParts,
        recording: Recording | None,
        shape: tuple[int, ...],
        tile: LargestTile,
        segments: bool,
        on_cpu: bool,
        entering: Mapping[Value, Tensor],
    ) -> None:
        self._parts, self._recording = parts, recording
        self._shape, self._segments = shape, segments
        self._tile, self._mesh = tile, tile.mesh
        self._split = tile.mesh.parts > 1
        touches = Touches() if tile.is_virtual else None
        self._ledger = Ledger(whole_pages=on_cpu, touches=touches)
        self._state = [one for state in parts.state for one in state]
        for tensor in self._state:
            self._ledger.own(tensor)
        self._hooks = self._followed_gradients() if touches is not None else []
        self._talks: dict[tuple[Phase, int], list[Talk]] = {}
        self._refused: str | None = None
        self._entering = {value: _arrived(value, one) for value, one in entering.items()}
        self._values = dict(self._entering)
        self._output: Any = None
        self.input = tile.bytes(entering[IMAGE]) if IMAGE in entering else 0
        self._loss: Tensor | None = None
        self._outcomes: dict[int, list[tuple[Value, int, int]]] = {}
        self._uses = parts.uses(recording)
        self._summed_in: dict[Value, int] = {}
        self._listened: list[Talk] = []  # in backward, of which so many are attributed
        self._attributed = 0
        self._forwarded = 0

    def _followed_gradients(self) -> list[RemovableHandle]:
        def told(weight: Tensor) -> None:
            touches, grad = self._ledger.touches, weight.grad
            memory = None if grad is None else self._ledger.memory_of(grad)
            if memory is not None and touches is not None:
                touches.add_up(self._ledger.part, memory.number)

        learn = (one for one in self._state if one.requires_grad and one.is_leaf)
        return [
            one.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]
            for one in learn
        ]

    def forward(self) -> None:
        for one in self._entering.values():
            self._ledger.own(local(one), enters=True)
        names = self._parts.names
        with self._watched(), keyed(0, 0, 0):
            for number in self._parts.span:
                if not self._run_part(number, names[number]):
                    return
            if self._parts.span.stop < len(names):
                return
            self._begin("forward", len(names))
            with record_talks() as talks:
                self._loss = dry_loss(self._output, self._segments, self._shape, self._mesh)
            self._heard("forward", len(names), talks)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._ledger.watch(), torch.device("meta"), follow_events(self._follow):
            yield

    def _follow(self, event: DryEvent) -> None:
        if self._ledger.touches is not None:
            self._ledger.touches.tell(self._ledger.part, event)

    def _run_part(self, number: int, name: str) -> bool:
        self._begin("forward", number)
        before = {id(one): one._version for one in self._values.values()}
        try:
            with record_talks() as talks:
                self._output = self._parts.run(number, self._values, self._recording)
        except (UnsupportedSpatialOp, ValueError, RuntimeError) as error:
            if not self._split:
                raise
            self._refused = f"{name or 'the network'}: {error}"
            return False
        self._heard("forward", number, talks)
        found = []
        for value, one in self._parts.given(number, self._values).items():
            memory = self._ledger.memory_of(local(one))
            place = next((i for i, m in enumerate(self._ledger.memories) if m is memory), -1)
            found.append((value, place, self._tile.bytes(one)))
            if one.requires_grad and before.get(id(one)) != one._version:
                part = one.part if isinstance(one, ChannelTensor) else one
                part.register_hook(self._arriving(number, value))  # type: ignore[no-untyped-call]
        self._outcomes[number] = found
        return True

    def _begin(self, phase: Phase, part: int) -> None:
        self._ledger.phase, self._ledger.part = phase, part

    def _heard(self, phase: Phase, part: int, talks: list[Talk]) -> None:
        self._talks.setdefault((phase, part), []).extend(talks)

    def _arriving(self, number: int, value: Value) -> Any:
        def hook(grad: Tensor) -> None:
            memory = self._ledger.memory_of(grad)
            self._summed_in[value] = number if memory is None else memory.part
            self._heard("backward", self._ledger.part, self._listened[self._attributed :])
            self._attributed = len(self._listened)
            self._ledger.part = min(self._ledger.part, number)

        return hook

    def backward(self) -> None:
        last = max(self._outcomes, default=0)
        self._begin("backward", last + (self._loss is not None))
        self._forwarded = len(self._ledger.moments)
        if self._ledger.touches is not None:
            self._ledger.touches.since = len(self._ledger.touches.steps)
        roots = list(self._values.values()) if self._loss is None else [self._loss]
        roots = [one for one in roots if one.requires_grad]
        self._output = None
        self._values.clear()
        given = [] if self._loss is not None else [torch.ones_like(one) for one in roots]
        for one in given:  # by the stage behind
            self._ledger.own(local(one), enters=True)
        with self._watched(), record_talks() as talks:
            self._listened = talks
            grads = given or [torch.ones_like(one) for one in roots]
            if roots:
                torch.autograd.backward(roots, grads)
            self._heard("backward", self._ledger.part, talks[self._attributed :])
        del roots, grads
        self._loss = None

    def result(self, on_cpu: bool) -> NetworkCosts:
        touches = self._ledger.touches
        if touches is not None:
            touches.made = [one.number for one in self._ledger.memories]
        found = self._result(MemorySizes(0, math.inf), on_cpu)
        if on_cpu:
            found.heap = self._result(MemorySizes(0, MAPPED_FROM), on_cpu)
            found.mapped = self._result(MemorySizes(MAPPED_FROM, math.inf), on_cpu)
        return found

    def _result(self, sizes: MemorySizes, workspace: bool) -> NetworkCosts:
        """With memory of some sizes only."""
        memories = [one for one in self._ledger.memories if sizes.hold(one.bytes)]
        rooms = [
            taken(moment.workspace) * (workspace and sizes.hold(moment.workspace))
            for moment in self._ledger.moments
        ]
        made = lives(self._ledger, memories, rooms, self._forwarded, self._gradients())
        costs = [self._layer(number, sizes) for number in self._outcomes]
        last = len(self._parts.names)
        has_loss = not self._refused and self._parts.span.stop == last
        loss = self._layer(last, sizes) if has_loss else None
        entering = self.input if sizes.hold(self.input) else 0
        touches = self._ledger.touches
        return NetworkCosts(costs, entering, loss, self._uses, made, self._refused, touches)

    def _layer(self, number: int, sizes: MemorySizes) -> LayerCosts:
        is_loss = number == len(self._parts.names)
        state = [] if is_loss else self._parts.state[number]
        given = [] if is_loss else self._outcomes[number]
        weights, buffers = (
            sum(
                x.nbytes
                for x in state
                if isinstance(x, nn.Parameter) is learns and sizes.hold(x.nbytes)
            )
            for learns in (True, False)
        )
        return LayerCosts(
            name="loss" if is_loss else self._parts.names[number],
            forward=self._ledger.work.get(("forward", number), []),
            backward=self._ledger.work.get(("backward", number), []),
            forward_talks=self._talks.get(("forward", number), []),
            backward_talks=self._talks.get(("backward", number), []),
            outputs=[
                Output(value, size * sizes.hold(size), place, self._summed_in.get(value, number))
                for value, place, size in given
            ],
            weights=weights,
            buffers=buffers,
        )

    def _gradients(self) -> set[int]:
        """Memories of the weights' gradients."""
        found = set()
        for one in self._state:
            memory = None if one.grad is None else self._ledger.memory_of(one.grad)
            if memory is not None:
                found.add(id(memory))
        return found

    def forget(self) -> None:
        """Free the weights' gradients: the next run begins without."""
        for one in self._state:
            one.grad = None
        for hook in self._hooks:
            hook.remove()


def _arrived(value: Value, x: Tensor) -> Tensor:
    """As a stage gets it: what other stages give wants a gradient."""
    wants = value != IMAGE and x.is_floating_point()
    return on_tile(enter, x.detach().requires_grad_()) if wants else x
