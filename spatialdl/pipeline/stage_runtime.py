"""Runtime of one stage of one network copy on a rank: its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.across import Across
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh, stage_mesh
from spatialdl.layout.layout import Layout
from spatialdl.layout.placement import Placement, Position
from spatialdl.pipeline.handovers import Handovers, StageLink
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import Criterion, TileRegion, run_tile
from spatialdl.pipeline.shapes import (
    Border,
    HandoverShapes,
    over_ranks,
    own_samples,
)
from spatialdl.pipeline.simulate import Action
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.pipeline.virtual_tiles import Made, VirtualTiles
from spatialdl.spatial.streaming.memory import Memory


@dataclass
class Microbatch:
    """This rank's part of one micro-batch of its replica.

    Attributes:
        samples: number of samples, the same on all ranks of the replica; they all skip 0.
        share: fraction of the whole batch's samples; weight of their mean loss.
        tile: (N, C, *own), this rank's box of the images; on the first stage only.
        target: (N,) or (N, targets), or this rank's box of masks; on the last stage only.
        size: sizes of the spatial dims where images differ in size; a micro-batch then has one
            image on a replica. For networks of one stage only.
        place: index of that image in its batch, which selects its random numbers.
        images, masks: replace `tile` and the masks on ranks with virtual tiles.
    """

    samples: int
    share: float
    tile: Tensor | None = None
    target: Tensor | None = None
    size: tuple[int, ...] | None = None
    place: int = 0
    images: TileRegion | None = None
    masks: TileRegion | None = None


class CrossingValue(NamedTuple):
    """A value at a border of a stage.

    Attributes:
        over_ranks: its shape for the hand-over between ranks, see `shapes.over_ranks`.
        learns: whether its gradient crosses the border, too.
    """

    value: Value
    shape: HandoverShape
    over_ranks: HandoverShape
    link: StageLink
    learns: bool


class StageRuntime:
    """Execution of a stage on this rank; construction is collective over its mesh.

    Args:
        module: its layers.
        comm: all ranks of the placement.
        handovers: over all borders of the network.
        shapes: of what passes the borders.
        learns: per stage of the network, whether it has trainable parameters.
        options: of the pipeline.
        memory: stores tensors of virtual tiles between uses, if ranks have any.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        position: Position,
        comm: Communicator,
        handovers: Handovers,
        shapes: HandoverShapes,
        learns: Sequence[bool],
        options: PipelineOptions,
        memory: Memory | None = None,
    ) -> None:
        self._placement, self._shapes, self.options = placement, shapes, options
        self.module, self.position = module, position
        self.is_first = position.stage == 0
        self.is_last = position.stage == placement.stages - 1
        self.mesh: Mesh = stage_mesh(placement, position, comm)
        self._tiles = memory and VirtualTiles(module, self.mesh, options, memory)
        # Gradients cross a border if any stage before it learns. Both sides derive this from the
        # whole network, so they agree.
        self._learns = {b for b in handovers.borders if any(learns[: b.giver + 1])}
        own = handovers.at(position)
        self._before = {b: link for b, link in own.items() if b.taker == position.stage}
        self._after = {b: link for b, link in own.items() if b.giver == position.stage}
        self._links = own
        self._made: dict[int, Made] = {}
        self._some: dict[tuple[int, ...], Communicator] = {}

    @property
    def across(self) -> Across | None:
        """Exchange of its virtual tiles with those of peers, if there are any."""
        return self._tiles.across if self._tiles else None

    def own(self, samples: int) -> range:
        """Samples of a micro-batch that this rank works on."""
        return own_samples(self._placement, self.position.stage, self.position.part, samples)

    def arriving(
        self, samples: int, dtype: torch.dtype, size: Sequence[int] | None = None
    ) -> dict[Value, HandoverShape]:
        """Shapes of all inputs of this stage for a micro-batch.

        Args:
            dtype: of the images.
            size: of their spatial dims, where it is not that of the pipeline.
        """
        shapes: dict[Value, HandoverShape] = {}
        if self.is_first:
            channels, *sizes = self._shapes.image_size
            layout = Layout.even(samples, size or sizes, self.mesh.tile_grid)
            images = (samples, channels, *layout.size)
            shapes[IMAGE] = HandoverShape(images, dtype, layout, layout)
        passing = self._shapes.of(samples)
        for border in self._before:
            shapes |= passing[border]
        return shapes

    def expect(self, action: Action, samples: int) -> None:
        """Post the receives of an action, so that they overlap the current one."""
        device = self.options.device
        if action.kind == "forward":
            for one in self._crossing(self._before, samples):
                one.link.forward[0].expect(one.over_ranks, action.microbatch, device)
        else:
            for one in self._crossing(reversed(self._after), samples, backward=True):
                one.link.backward[0].expect_back(one.over_ranks, action.microbatch, device)

    def forward(self, number: int, microbatch: Microbatch) -> Made:
        """Run the forward of a micro-batch and send its outputs without waiting.

        Raises:
            ValueError: if the first stage has no images.
        """
        samples, device = microbatch.samples, self.options.device
        tiles: dict[Value, Any] = {}
        dtype = torch.get_default_dtype()
        if self.is_first:
            tile = microbatch.images or microbatch.tile
            if tile is None:
                raise ValueError("the first stage needs the images of its micro-batches")
            tiles[IMAGE], dtype = tile, tile.dtype
        for one in self._crossing(self._before, samples):
            tile = one.link.forward[0].receive(one.over_ranks, number, device)
            tiles[one.value] = tile.requires_grad_(torch.is_grad_enabled() and one.learns)
        shapes, own = self.arriving(samples, dtype, microbatch.size), len(self.own(samples))
        if self._tiles:
            made: Made = self._tiles.forward(tiles, shapes, own)
        else:
            made = run_tile(self.module, self.mesh, tiles, shapes, own, self.options)
        for one in self._crossing(self._after, samples):
            leaving = made.leaving(one.value, one.shape)
            for handover in one.link.forward:
                handover.send(leaving, one.over_ranks, number)
        if torch.is_grad_enabled():
            self._made[number] = made
        return made

    def _crossing(
        self, borders: Iterable[Border], samples: int, backward: bool = False
    ) -> Iterator[CrossingValue]:
        """Yield the values that cross some borders for a micro-batch, or have gradients."""
        passing = self._shapes.of(samples)
        for border in borders:
            for value, shape in passing[border].items():
                is_number = shape.dtype.is_floating_point or shape.dtype.is_complex
                learns = border in self._learns and value != IMAGE and is_number
                if learns or not backward:
                    whole = over_ranks(shape, self._placement.stream)
                    yield CrossingValue(value, shape, whole, self._links[border], learns)

    def backward(
        self, number: int, microbatch: Microbatch, criterion: Criterion, weight: float | Tensor
    ) -> Tensor | float:
        """Run the backward of a micro-batch and send input gradients without waiting.

        Args:
            weight: weight of the mean loss in the objective.

        Returns:
            The mean loss on the last stage, float64 (), not yet synchronized; else 0.

        Raises:
            ValueError: if the last stage has no targets.
        """
        made, samples = self._made.pop(number), microbatch.samples
        value: Tensor | float = 0.0
        if self.is_last:
            target: Any = microbatch.masks or microbatch.target
            if target is None:
                raise ValueError("the last stage needs the targets of its micro-batches")
            own = self.own(samples)
            if len(own) < samples:
                target = target[own.start : own.stop]
            value = made.backward_of_loss(criterion, target, weight)
        else:
            grads: dict[Value, Tensor] = {}  # summed for values sent to several stages
            shapes: dict[Value, HandoverShape] = {}
            for one in self._crossing(reversed(self._after), samples, backward=True):
                grad = one.link.backward[0].receive_back(
                    one.over_ranks, number, self.options.device
                )
                grads[one.value] = grads[one.value] + grad if one.value in grads else grad
                shapes[one.value] = one.shape
            made.backward_of(grads, shapes)
        for one in self._crossing(self._before, samples, backward=True):
            gradient = made.gradient(one.value, one.shape)
            for handover in one.link.backward:
                handover.send_back(gradient, one.over_ranks, number)
        return value

    def ranks_of(self, samples: Mapping[int, int]) -> Communicator:
        """Ranks of this stage that work on a micro-batch; the first call is collective.

        Args:
            samples: number of samples by data replica.
        """
        width = self.mesh.size // self.mesh.data
        ranks = tuple(
            replica * width + part
            for replica, count in samples.items()
            for part in range(width)
            if own_samples(self._placement, self.position.stage, part, count)
        )
        if len(ranks) == self.mesh.size:
            return self.mesh.comm
        if len(samples) == 1 and len(ranks) == width:
            return self.mesh.grid_comm
        if ranks not in self._some:
            self._some[ranks] = self.mesh.comm.subset(ranks)
        return self._some[ranks]

    def wait_sent(self) -> None:
        """Wait until all sends have completed, at the end of a step."""
        for link in (*self._before.values(), *self._after.values()):
            for handover in (*link.forward, *link.backward):
                handover.wait_sent()


def moved(stage: nn.Module, device: torch.device) -> nn.Module:
    """Move a stage in place; parameters stay shared, and keep hooks and attributes.

    For out-of-tree devices ``Module.to`` makes new parameters, one for each module that uses a
    shared one, and without the hooks of the old ones.
    """
    before = [(module, dict(module._parameters)) for module in stage.modules()]
    stage.to(device)
    made: dict[int, nn.Parameter] = {}
    for module, parameters in before:
        for name, old in parameters.items():
            new = module._parameters[name]
            if old is None or new is None or new is old:
                continue
            if id(old) not in made:
                made[id(old)] = _with_all_of(old, new)
            module._parameters[name] = made[id(old)]
    return stage


def _with_all_of(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    new.__dict__.update(old.__dict__)
    hooks, late_hooks = old._backward_hooks or {}, old._post_accumulate_grad_hooks or {}
    if hooks or late_hooks:
        new.requires_grad_()  # frozen ones take no hooks
        for hook in hooks.values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in late_hooks.values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        new.requires_grad_(old.requires_grad)
    return new
