"""Costs of each part of a network on one rank: operations, messages, memory.

Runs the network forwards and backwards once, without data, as the rank of a grid with the largest
tile. A stage is a range of parts, so one run gives the costs of all stages on this grid. After a
change of grid, tiles may differ by a pixel from those counted here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.allocator import MAPPED_FROM
from spatialdl.comm.dry import Talk, record_talks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.own_tile import enter
from spatialdl.pipeline.steps import IMAGE, Recording, Value
from spatialdl.planning.peaks import Lives, lives, lives_between
from spatialdl.planning.preflight import dry_loss
from spatialdl.planning.program import DividedStage, LargestTile, NetworkParts, Program, local
from spatialdl.spatial.channels.tensor import ChannelTensor, on_tile
from spatialdl.spatial.random import keyed
from spatialdl.spatial.streaming.ledger import Ledger, Phase, RankOperation, taken


class Output(NamedTuple):
    """A value on its rank.

    Attributes:
        memory: its index in `NetworkCosts.lives`; -1 if the run has not allocated it.
        summed_in: the part that allocated the memory in which its gradient is accumulated.
    """

    value: Value
    bytes: int
    memory: int
    summed_in: int


@dataclass
class LayerCosts:
    """Costs of one part of the network on one rank; memory in bytes.

    Attributes:
        forward, backward: operations in order.
        forward_messages, backward_messages: to the other ranks of its grid, and to those that
            divide its channels.
        outputs: values for later parts.
        weights, buffers: of the part.
    """

    name: str
    forward: list[RankOperation] = field(default_factory=list)
    backward: list[RankOperation] = field(default_factory=list)
    forward_messages: list[Talk] = field(default_factory=list)
    backward_messages: list[Talk] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    weights: int = 0
    buffers: int = 0


@dataclass
class NetworkCosts:
    """Costs of the parts of a network in order.

    Attributes:
        input: bytes of the rank's tile of the images.
        loss: costs of the loss after the last part; None if it was not reached.
        uses: parts that take a value, in order.
        lives: lifetimes of allocated memory.
        refused: why parts after the listed ones are not supported on this grid.
        heap, mapped: on a CPU the same costs, counting only memory in the C library's heap, or
            only memory mapped by itself, see `spatialdl.comm.allocator`.
    """

    layers: list[LayerCosts]
    input: int
    loss: LayerCosts | None
    uses: dict[Value, list[int]]
    lives: Lives = field(compare=False)
    refused: str | None = None
    heap: NetworkCosts | None = None
    mapped: NetworkCosts | None = None

    @cached_property
    def values(self) -> dict[Value, int]:
        """Bytes of the outputs of all parts, and of the images."""
        sizes = {output.value: output.bytes for layer in self.layers for output in layer.outputs}
        return {IMAGE: self.input, **sizes}


class MemorySizes(NamedTuple):
    """Half-open range of memory sizes in bytes."""

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
        shape: (N, C, *spatial) of the whole images of a micro-batch of one replica.
        grid: of ranks over the images.
        stream: virtual tiles of a rank along each spatial dim; () for none. Operations are counted
            for one tile; messages, outputs and the input for all tiles of a rank.
        uncut: whether the network is run as a whole, and not step by step.
        segments: whether it predicts a class for every pixel.
        on_cpu: whether convolutions need workspace.
        divided: a stage with divided channels, whose parts alone are run.

    Raises:
        CannotRecord: if its steps depend on the number of samples.
        UnsupportedSpatialOp: if channels cannot be divided.
    """
    parts = program.parts(uncut)
    recording = program.recording(shape[0]) if parts.is_recorded else None
    tile = LargestTile(shape, grid, stream)
    entering: Mapping[Value, Tensor] = {IMAGE: tile.image(parts.dtype)}
    if divided is not None:
        entering = parts.entering(divided, recording, entering)
        parts = program.divided(divided, uncut, shape[0], entering)
    run = _CountedRun(parts, recording, shape, tile, segments, on_cpu, entering)
    try:
        run.forward()
        run.backward()
        return run.result(on_cpu)
    finally:
        run.forget()


class _CountedRun:
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
        self._ledger = Ledger(whole_pages=on_cpu)
        self._state = [tensor for state in parts.state for tensor in state]
        for tensor in self._state:
            self._ledger.own(tensor)
        self._sent: dict[tuple[Phase, int], list[Talk]] = {}
        self._refused: str | None = None
        self._entering = {value: _arrived(value, tensor) for value, tensor in entering.items()}
        self._values = dict(self._entering)
        self._output: Any = None
        self.input = tile.bytes(entering[IMAGE]) if IMAGE in entering else 0
        self._loss: Tensor | None = None
        self._outcomes: dict[int, list[tuple[Value, int, int]]] = {}
        self._uses = parts.uses(recording)
        self._summed_in: dict[Value, int] = {}
        self._messages: list[Talk] = []  # of backward, the first `_attributed` are attributed
        self._attributed = 0
        self._forwarded = 0

    def forward(self) -> None:
        for tensor in self._entering.values():
            self._ledger.own(local(tensor))
        names = self._parts.names
        with self._ledger.watch(), torch.device("meta"), keyed(0, 0, 0):
            for number in self._parts.span:
                if not self._run_part(number, names[number]):
                    return
            if self._parts.span.stop < len(names):
                return
            self._begin("forward", len(names))
            with record_talks() as talks:
                self._loss = dry_loss(self._output, self._segments, self._shape, self._mesh)
            self._record_messages("forward", len(names), talks)

    def _run_part(self, number: int, name: str) -> bool:
        self._begin("forward", number)
        before = {id(value): value._version for value in self._values.values()}
        try:
            with record_talks() as talks:
                self._output = self._parts.run(number, self._values, self._recording)
        except (UnsupportedSpatialOp, ValueError, RuntimeError) as error:
            if not self._split:
                raise
            self._refused = f"{name or 'the network'}: {error}"
            return False
        self._record_messages("forward", number, talks)
        outcomes = []
        for value, tensor in self._parts.given(number, self._values).items():
            memory = self._ledger.memory_of(local(tensor))
            place = next((i for i, m in enumerate(self._ledger.memories) if m is memory), -1)
            outcomes.append((value, place, self._tile.bytes(tensor)))
            if tensor.requires_grad and before.get(id(tensor)) != tensor._version:
                part = tensor.part if isinstance(tensor, ChannelTensor) else tensor
                part.register_hook(self._arriving(number, value))  # type: ignore[no-untyped-call]
        self._outcomes[number] = outcomes
        return True

    def _begin(self, phase: Phase, part: int) -> None:
        self._ledger.phase, self._ledger.part = phase, part

    def _record_messages(self, phase: Phase, part: int, talks: list[Talk]) -> None:
        self._sent.setdefault((phase, part), []).extend(talks)

    def _arriving(self, number: int, value: Value) -> Any:
        def hook(grad: Tensor) -> None:
            memory = self._ledger.memory_of(grad)
            self._summed_in[value] = number if memory is None else memory.part
            self._record_messages("backward", self._ledger.part, self._messages[self._attributed :])
            self._attributed = len(self._messages)
            self._ledger.part = min(self._ledger.part, number)

        return hook

    def backward(self) -> None:
        last = max(self._outcomes, default=0)
        self._begin("backward", last + (self._loss is not None))
        self._forwarded = len(self._ledger.moments)
        roots = list(self._values.values()) if self._loss is None else [self._loss]
        roots = [root for root in roots if root.requires_grad]
        self._output = None
        self._values.clear()
        seeds = [] if self._loss is not None else [torch.ones_like(root) for root in roots]
        for root in seeds:  # sent by the next stage
            self._ledger.own(local(root))
        with self._ledger.watch(), torch.device("meta"), record_talks() as talks:
            self._messages = talks
            grads = seeds or [torch.ones_like(root) for root in roots]
            if roots:
                torch.autograd.backward(roots, grads)
            self._record_messages("backward", self._ledger.part, talks[self._attributed :])
        del roots, grads
        self._loss = None

    def result(self, on_cpu: bool) -> NetworkCosts:
        costs = self._result(MemorySizes(0, math.inf), on_cpu)
        if on_cpu:
            costs.heap = self._result(MemorySizes(0, MAPPED_FROM), on_cpu)
            costs.mapped = self._result(MemorySizes(MAPPED_FROM, math.inf), on_cpu)
        return costs

    def _result(self, sizes: MemorySizes, workspace: bool) -> NetworkCosts:
        """Costs that count only memory of some sizes."""
        memories = [memory for memory in self._ledger.memories if sizes.hold(memory.bytes)]
        rooms = [
            taken(moment.workspace) * (workspace and sizes.hold(moment.workspace))
            for moment in self._ledger.moments
        ]
        lives_made = lives(self._ledger, memories, rooms, self._forwarded, self._gradients())
        costs = [self._layer(number, sizes) for number in self._outcomes]
        last = len(self._parts.names)
        has_loss = not self._refused and self._parts.span.stop == last
        loss = self._layer(last, sizes) if has_loss else None
        entering = self.input if sizes.hold(self.input) else 0
        return NetworkCosts(costs, entering, loss, self._uses, lives_made, self._refused)

    def _layer(self, number: int, sizes: MemorySizes) -> LayerCosts:
        is_loss = number == len(self._parts.names)
        state = [] if is_loss else self._parts.state[number]
        outcomes = [] if is_loss else self._outcomes[number]
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
            forward_messages=self._sent.get(("forward", number), []),
            backward_messages=self._sent.get(("backward", number), []),
            outputs=[
                Output(value, size * sizes.hold(size), place, self._summed_in.get(value, number))
                for value, place, size in outcomes
            ],
            weights=weights,
            buffers=buffers,
        )

    def _gradients(self) -> set[int]:
        """Ids of the memories of weight gradients."""
        gradients = set()
        for tensor in self._state:
            memory = None if tensor.grad is None else self._ledger.memory_of(tensor.grad)
            if memory is not None:
                gradients.add(id(memory))
        return gradients

    def forget(self) -> None:
        """Free weight gradients for the next run."""
        for tensor in self._state:
            tensor.grad = None


def _arrived(value: Value, x: Tensor) -> Tensor:
    """Make a value a stage's input: outputs of other stages require gradients."""
    wants = value != IMAGE and x.is_floating_point()
    return on_tile(enter, x.detach().requires_grad_()) if wants else x


def with_stage(whole: NetworkCosts, own: NetworkCosts, which: DividedStage) -> NetworkCosts:
    """Replace the costs of one stage by those counted for it with divided channels."""
    layers = [*whole.layers[: which.first], *own.layers, *whole.layers[which.after :]]
    heap, mapped = (
        with_stage(a, b, which) if a is not None and b is not None else None
        for a, b in ((whole.heap, own.heap), (whole.mapped, own.mapped))
    )
    loss = own.loss or whole.loss
    return replace(whole, layers=layers, loss=loss, lives=own.lives, heap=heap, mapped=mapped)


def between(a: NetworkCosts, b: NetworkCosts, share: float) -> NetworkCosts | None:
    """Extrapolate costs linearly from `a` (share 0) through `b` (share 1), over samples.

    Returns:
        None if the two runs had different operations.
    """
    if a.refused or b.refused or a.loss is None or b.loss is None:
        return None
    layers = [_between(x, y, share) for x, y in zip(a.layers, b.layers, strict=True)]
    loss, made = _between(a.loss, b.loss, share), lives_between(a.lives, b.lives, share)
    if loss is None or made is None or any(layer is None for layer in layers):
        return None
    return NetworkCosts(
        [layer for layer in layers if layer is not None],
        round(a.input + share * (b.input - a.input)),
        loss,
        a.uses,
        made,
    )


def _between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts | None:
    values: dict[str, Any] = {}
    for key, x in vars(a).items():
        y = getattr(b, key)
        if isinstance(x, list):
            if [entry[0] for entry in x] != [entry[0] for entry in y]:
                return None
            values[key] = [
                type(p)(
                    *(
                        m if isinstance(m, str | Value) else round(m + share * (n - m))
                        for m, n in zip(p, q, strict=True)
                    )
                )
                for p, q in zip(x, y, strict=True)
            ]
        elif isinstance(x, int) and not isinstance(x, bool):
            values[key] = round(x + share * (y - x))
        else:
            values[key] = x
    return LayerCosts(**values)
