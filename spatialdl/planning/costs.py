"""What each layer of a network costs one rank: operations, messages, memory.

The network runs forwards and backwards once, without data, as the rank of a grid with the largest
tile. A stage is a range of its layers, so one run tells the costs of all stages on this grid. After
a change of grid tiles may differ by a pixel from those that are counted here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.allocator import MAPPED_FROM
from spatialdl.checking.dry_loss import dry_loss
from spatialdl.comm.dry import Talk, listening
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout import Layout
from spatialdl.mesh import dry_mesh
from spatialdl.pipeline.recording import meta_copy
from spatialdl.planning.layers import Layer
from spatialdl.planning.ledger import Ledger, Memory, Phase, Work, taken
from spatialdl.planning.peaks import peaks_backward, peaks_forward
from spatialdl.random import keyed, scope
from spatialdl.spatial.tensor import SpatialTensor


@dataclass
class LayerCosts:
    """One layer on one rank; memory in bytes.

    Attributes:
        forward, backward: operations in order.
        forward_talks, backward_talks: what it says to the other ranks of its grid.
        output: what it gives to the next layer.
        kept: what it makes and its backward needs.
        output_kept: whether the output is in `kept`.
        forward_extra: most memory beside what earlier layers keep, while it runs.
        backward_extra: the same in backward, its own `kept` and the gradients of its weights
            included.
        weights, buffers: of the layer.
    """

    name: str
    forward: list[Work] = field(default_factory=list)
    backward: list[Work] = field(default_factory=list)
    forward_talks: list[Talk] = field(default_factory=list)
    backward_talks: list[Talk] = field(default_factory=list)
    output: int = 0
    kept: int = 0
    output_kept: bool = False
    forward_extra: int = 0
    backward_extra: int = 0
    weights: int = 0
    buffers: int = 0


@dataclass
class NetworkCosts:
    """The layers of a network in order.

    Attributes:
        input: bytes of the rank's tile of the images.
        loss: what is done after the last layer; None if that was not reached.
        refused: why layers after those that are listed cannot work on this grid.
        heap, mapped: on a CPU the same, with the memory alone that lies in the C library's heap, or
            is mapped by itself, see `spatialdl.allocator`.
    """

    layers: list[LayerCosts]
    input: int
    loss: LayerCosts | None
    refused: str | None = None
    heap: NetworkCosts | None = None
    mapped: NetworkCosts | None = None


class Sizes(NamedTuple):
    """Of memories, in bytes; half-open."""

    low: float
    high: float

    def hold(self, size: int) -> bool:
        return self.low <= size < self.high


def count(
    layers: Sequence[Layer],
    shape: tuple[int, int, int, int],
    grid: tuple[int, int] = (1, 1),
    *,
    segments: bool = False,
    on_cpu: bool = True,
) -> NetworkCosts:
    """Run layers on the ``meta`` device, forwards and backwards.

    Args:
        layers: of a whole network, each of which gets what the one before gives.
        shape: (N, C, H, W) of the images of a micro-batch of one replica, whole.
        grid: into which they are cut.
        segments: whether it learns a class for every pixel.
        on_cpu: where convolutions need memory for themselves.
    """
    run = _Run(layers, shape, grid, segments, on_cpu)
    run.forward()
    run.backward()
    return run.result(on_cpu)


class _Run:
    def __init__(
        self,
        layers: Sequence[Layer],
        shape: tuple[int, int, int, int],
        grid: tuple[int, int],
        segments: bool,
        on_cpu: bool,
    ) -> None:
        whole = meta_copy(nn.ModuleList([layer for _, layer in layers])).train()
        self._names = [name for name, _ in layers]
        self._layers = list(whole.children())
        self._shape, self._segments = shape, segments
        samples, _, height, width = shape
        self._layout = Layout.even((samples, height, width), grid)
        self._mesh = dry_mesh(grid, largest_part(self._layout))
        self._split = grid != (1, 1)
        dtype = next((p.dtype for p in whole.parameters()), torch.get_default_dtype())
        self._ledger = Ledger(whole_pages=on_cpu)
        for tensor in (*whole.parameters(), *whole.buffers()):
            self._ledger.own(tensor)
        self._talks: dict[tuple[Phase, int], list[Talk]] = {}
        self._refused: str | None = None
        self._last: Any = self._images(dtype)
        self.input = _bytes(self._last)
        self._loss: Tensor | None = None
        self._outcomes: list[list[Memory | None]] = []
        self._listened: list[Talk] = []  # in backward, of which so many are told
        self._told = 0
        self._forwarded = 0

    def _images(self, dtype: torch.dtype) -> Tensor:
        samples, channels = self._shape[:2]
        if not self._split:
            return torch.empty(self._shape, dtype=dtype, device="meta")
        _, rows, cols = self._mesh.own_box(self._layout).shape
        tile = torch.empty((samples, channels, rows, cols), dtype=dtype, device="meta")
        return SpatialTensor(tile, self._layout, self._mesh)

    def forward(self) -> None:
        self._ledger.own(_local(self._last))
        with self._ledger.watch(), torch.device("meta"), keyed(0, 0, 0):
            for number, (name, layer) in enumerate(zip(self._names, self._layers, strict=True)):
                if not self._run_layer(number, name, layer):
                    return
            self._begin("forward", len(self._layers))
            with listening() as talks:
                self._loss = dry_loss(self._last, self._segments, self._shape, self._mesh)
            self._heard("forward", len(self._layers), talks)

    def _run_layer(self, number: int, name: str, layer: nn.Module) -> bool:
        self._begin("forward", number)
        given = _tensors(self._last)
        try:
            with listening() as talks, scope(name):
                output = layer(self._last)
        except (UnsupportedSpatialOp, ValueError, RuntimeError) as error:
            if not self._split:
                raise
            self._refused = f"{name or 'the network'}: {error}"
            return False
        self._heard("forward", number, talks)
        self._last = output
        found = []
        for one in _tensors(output):
            found.append(self._ledger.memory_of(one))
            if one.requires_grad and not any(one is other for other in given):
                one.register_hook(self._entering(number))  # type: ignore[no-untyped-call]
        self._outcomes.append(found)
        return True

    def _begin(self, phase: Phase, part: int) -> None:
        self._ledger.phase, self._ledger.part = phase, part

    def _heard(self, phase: Phase, part: int, talks: list[Talk]) -> None:
        self._talks.setdefault((phase, part), []).extend(talks)

    def _entering(self, number: int) -> Any:
        def hook(grad: Tensor) -> None:
            self._heard("backward", self._ledger.part, self._listened[self._told :])
            self._told = len(self._listened)
            self._ledger.part = min(self._ledger.part, number)

        return hook

    def backward(self) -> None:
        last = len(self._outcomes) - 1
        self._begin("backward", last + 1 if self._loss is not None else max(last, 0))
        self._forwarded = len(self._ledger.moments)
        roots = _tensors(self._last) if self._loss is None else [self._loss]
        roots = [one for one in roots if one.requires_grad]
        self._last = None
        with self._ledger.watch(), torch.device("meta"), listening() as talks:
            self._listened = talks
            grads = [torch.ones_like(one) for one in roots]
            if roots:
                torch.autograd.backward(roots, grads)
            self._heard("backward", self._ledger.part, talks[self._told :])
        del roots, grads
        self._loss = None

    def result(self, on_cpu: bool) -> NetworkCosts:
        found = self._result(Sizes(0, math.inf), on_cpu)
        if on_cpu:
            found.heap = self._result(Sizes(0, MAPPED_FROM), on_cpu)
            found.mapped = self._result(Sizes(MAPPED_FROM, math.inf), on_cpu)
        return found

    def _result(self, sizes: Sizes, workspace: bool) -> NetworkCosts:
        """With memory of some sizes only."""
        memories = [one for one in self._ledger.memories if sizes.hold(one.bytes)]
        rooms = [
            taken(moment.workspace) * (workspace and sizes.hold(moment.workspace))
            for moment in self._ledger.moments
        ]
        parts, since = len(self._outcomes) + 1, self._forwarded
        forward = peaks_forward(self._ledger, memories, rooms, parts, since)
        backward = peaks_backward(self._ledger, memories, rooms, parts, since, self._gradients())
        of_part: dict[int, list[Memory]] = {}
        for memory in memories:
            if memory.phase == "forward":
                of_part.setdefault(memory.part, []).append(memory)
        costs = [
            self._layer(number, sizes, of_part.get(number, []), forward[number], backward[number])
            for number in range(parts)
        ]
        loss = None if self._refused else costs[-1]
        entering = self.input if sizes.hold(self.input) else 0
        return NetworkCosts(costs[:-1], entering, loss, self._refused)

    def _layer(
        self, number: int, sizes: Sizes, made: Sequence[Memory], forward: int, backward: int
    ) -> LayerCosts:
        is_loss = number == len(self._outcomes)
        module = nn.Module() if is_loss else self._layers[number]
        kept = [one for one in made if one.died is None or one.died > self._forwarded]
        given = () if is_loss else self._outcomes[number]
        outputs = {id(one): one for one in given if one is not None and sizes.hold(one.bytes)}
        own = [one for one in outputs.values() if one.part == number]
        weights, buffers = (
            sum(tensor.nbytes for tensor in tensors if sizes.hold(tensor.nbytes))
            for tensors in (module.parameters(), module.buffers())
        )
        return LayerCosts(
            name="loss" if is_loss else self._names[number],
            forward=self._ledger.work.get(("forward", number), []),
            backward=self._ledger.work.get(("backward", number), []),
            forward_talks=self._talks.get(("forward", number), []),
            backward_talks=self._talks.get(("backward", number), []),
            output=sum(one.bytes for one in outputs.values()),
            kept=sum(one.taken for one in kept),
            output_kept=all(any(one is k for k in kept) for one in own),
            forward_extra=forward,
            backward_extra=backward,
            weights=weights,
            buffers=buffers,
        )

    def _gradients(self) -> set[int]:
        """Memories of the weights' gradients."""
        found = set()
        for layer in self._layers:
            for parameter in layer.parameters():
                memory = None if parameter.grad is None else self._ledger.memory_of(parameter.grad)
                if memory is not None:
                    found.add(id(memory))
        return found


def between(a: NetworkCosts, b: NetworkCosts, share: float) -> NetworkCosts | None:
    """Costs on the straight line from `a` (share 0) through `b` (share 1): of other samples.

    Returns:
        None if the two did not do the same operations.
    """
    if a.refused or b.refused or a.loss is None or b.loss is None:
        return None
    layers = [_between(x, y, share) for x, y in zip(a.layers, b.layers, strict=True)]
    loss = _between(a.loss, b.loss, share)
    if loss is None or any(one is None for one in layers):
        return None
    return NetworkCosts(
        [one for one in layers if one is not None],
        round(a.input + share * (b.input - a.input)),
        loss,
    )


def _between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts | None:
    values: dict[str, Any] = {}
    for key, x in vars(a).items():
        y = getattr(b, key)
        if isinstance(x, list):
            if [one[0] for one in x] != [one[0] for one in y]:
                return None
            values[key] = [
                type(p)(
                    p[0], *(round(m + share * (n - m)) for m, n in zip(p[1:], q[1:], strict=True))
                )
                for p, q in zip(x, y, strict=True)
            ]
        elif isinstance(x, int) and not isinstance(x, bool):
            values[key] = round(x + share * (y - x))
        else:
            values[key] = x
    return LayerCosts(**values)


def largest_part(layout: Layout) -> int:
    """The part with the most pixels, of these the one with the most neighbours."""
    rows, cols = layout.grid

    def size(part: int) -> tuple[int, int]:
        row, col = divmod(part, cols)
        neighbours = (row > 0) + (row < rows - 1) + (col > 0) + (col < cols - 1)
        _, height, width = layout.boxes[part].shape
        return height * width, neighbours

    return max(range(rows * cols), key=size)


def _tensors(output: Any) -> list[Tensor]:
    given = output if isinstance(output, tuple) else (output,)
    return [one for one in given if isinstance(one, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor._tile if isinstance(tensor, SpatialTensor) else tensor


def _bytes(tensors: Any) -> int:
    listed = tensors if isinstance(tensors, list) else _tensors(tensors)
    return sum(_local(one).nbytes for one in listed)
