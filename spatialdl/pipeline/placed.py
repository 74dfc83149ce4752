"""One stage of one copy of the network as a rank holds it: its forward, its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.channels.weights import whole_outputs
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh, stage_mesh
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement, Position
from spatialdl.pipeline.action import Action
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.handovers import Handovers
from spatialdl.pipeline.shapes import Border, Passing, SplitShape, own_samples
from spatialdl.pipeline.stage import OUTPUT, run_stage, run_stage_again
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.tensor import SpatialTensor, from_tile

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Microbatch:
    """What a rank brings to one micro-batch of its replica.

    Attributes:
        samples: how many, on all ranks of the replica alike; 0 is left out by all of them.
        share: of the whole batch's samples that these are; their mean loss counts so much.
        tile: (N, C, *own), this rank's box of the images; on the first stage only.
        target: (N,), on the last stage only.
        size: of the spatial dims of this image, where images differ in size, of which a micro-batch
            then has one on a replica; of networks of one stage only.
        place: of that image in its batch, by which random numbers are drawn.
    """

    samples: int
    share: float
    tile: Tensor | None = None
    target: Tensor | None = None
    size: tuple[int, ...] | None = None
    place: int = 0


@dataclass
class _Held:
    """What the backward of a micro-batch needs."""

    tiles: dict[Value, Tensor]
    outputs: dict[Value, Any]


class _Enter(torch.autograd.Function):
    """A stage may begin with an operation in place, which autograd forbids on a leaf."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor) -> Tensor:
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def enter(tile: Tensor) -> Tensor:
    """The same tensor, into which the first operation of a stage may write."""
    entered: Tensor = _Enter.apply(tile)  # type: ignore[no-untyped-call]
    return entered


class PlacedStage:
    """A stage at work on this rank; the ranks of its mesh make it together.

    Args:
        module: its layers.
        comm: all ranks of the placement.
        handovers: over all borders of the network.
        learns: per stage of the network whether it has anything to learn.
        recompute: whether only its input is kept for backward, and it runs again there.
        mixed: the type to which autocast casts, if it does.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        position: Position,
        comm: Communicator,
        handovers: Handovers,
        learns: Sequence[bool],
        recompute: bool,
        mixed: torch.dtype | None = None,
    ) -> None:
        self._recompute, self._placement, self._mixed = recompute, placement, mixed
        self.module, self.position = module, position
        self.is_first = position.stage == 0
        self.is_last = position.stage == placement.stages - 1
        self.mesh: Mesh = stage_mesh(placement, position, comm)
        # a gradient passes a border if anything before it learns: so that both sides agree,
        # it follows from the whole network
        self._learns = {b for b in handovers.borders if any(learns[: b.giver + 1])}
        own = handovers.at(position)
        self._before = {b: one for b, one in own.items() if b.taker == position.stage}
        self._after = {b: one for b, one in own.items() if b.giver == position.stage}
        self._held: dict[int, _Held] = {}
        self._some: dict[tuple[int, ...], Communicator] = {}

    def own(self, samples: int) -> range:
        """Those of the samples of a micro-batch that this rank works on."""
        return own_samples(self._placement, self.position.stage, self.position.part, samples)

    def arriving(
        self, passing: Passing, images: tuple[int, ...], dtype: torch.dtype
    ) -> dict[Value, HandoverShape]:
        """All that this stage is given for a micro-batch.

        Args:
            passing: what passes the borders.
            images: global shape (samples, channels, *spatial).
            dtype: of the images.
        """
        found: dict[Value, HandoverShape] = {}
        if self.is_first:
            layout = self.mesh.layout(images[0], images[2:])
            found[IMAGE] = HandoverShape(images, dtype, layout, layout)
        for border in self._before:
            found |= passing[border]
        return found

    def expect(self, action: Action, passing: Passing, device: torch.device) -> None:
        """Be ready for what others give to an action; another one may run meanwhile."""
        if action.kind == "forward":
            for border, handover in self._before.items():
                for part in passing[border].values():
                    handover.expect(part, action.microbatch, device)
        elif action.kind == "backward":
            for border, handover in reversed(self._after.items()):
                for value, part in passing[border].items():
                    if self._has_gradient(border, value, part):
                        handover.expect_back(part, action.microbatch, device)

    def forward(
        self,
        number: int,
        microbatch: Microbatch,
        passing: Passing,
        image_size: tuple[int, ...],
        device: torch.device,
    ) -> Any:
        """What this stage returns for a micro-batch; what others take is on its way to them.

        Args:
            passing: what passes the borders.
            image_size: global sizes of the spatial dims.

        Raises:
            ValueError: if the first stage is not given its images.
        """
        samples = len(self.own(microbatch.samples))
        tiles: dict[Value, Tensor] = {}
        values: dict[Value, Tensor] = {}
        if self.is_first:
            if microbatch.tile is None:
                raise ValueError("the first stage needs the images of its micro-batches")
            tiles[IMAGE] = microbatch.tile
            layout = self.mesh.layout(microbatch.samples, image_size)
            values[IMAGE] = self.as_input(microbatch.tile, layout)
        for border, handover in self._before.items():
            for value, part in passing[border].items():
                tile = handover.receive(part, number, device)
                learns = torch.is_grad_enabled() and self._has_gradient(border, value, part)
                tiles[value] = tile.requires_grad_(learns)
                values[value] = self.received(tile, part)
        with autocast(device, self._mixed):
            if self._recompute:
                modules = [self.module]
                outputs = recompute(run_stage_again, self.module, values, samples, modules=modules)
            else:
                outputs = run_stage(self.module, values, samples)
        if self.mesh.tensor > 1:
            outputs = whole_outputs(outputs)
        for border, handover in self._after.items():
            for value, part in passing[border].items():
                given = outputs[value] if value in outputs else values[value]
                local = given._tile if isinstance(given, SpatialTensor) else given
                if isinstance(part, SplitShape):
                    local = part.leaving(local, self.position.part)
                handover.send(local, part, number)
        if torch.is_grad_enabled():
            self._held[number] = _Held(tiles, outputs)
        return outputs.get(OUTPUT)

    def as_input(self, tile: Tensor, layout: Layout) -> Tensor:
        """What the stage gets for a tile of a layout."""
        tile = enter(tile)
        if len(layout.boxes) == 1 or self.mesh.parts == 1:
            return tile
        return from_tile(tile, layout, self.mesh)

    def received(self, tile: Tensor, part: HandoverShape) -> Tensor:
        """What the stage gets for what has arrived."""
        if isinstance(part, SplitShape):
            return part.given_to(self.mesh, enter(tile))
        return self.as_input(tile, part.receiver)

    def _has_gradient(self, border: Border, value: Value, part: HandoverShape) -> bool:
        is_number = part.dtype.is_floating_point or part.dtype.is_complex
        return border in self._learns and value != IMAGE and is_number

    def backward(
        self,
        number: int,
        microbatch: Microbatch,
        passing: Passing,
        criterion: Criterion,
        weight: float | Tensor,
        device: torch.device,
    ) -> Tensor | float:
        """The backward of a micro-batch; its gradients are on their way to the stages before.

        Args:
            weight: with which the mean loss counts in the objective.

        Returns:
            The mean loss on the last stage, float64 (), which is not waited for; else 0.

        Raises:
            ValueError: if the last stage is not given its targets.
        """
        held = self._held.pop(number)
        value: Tensor | float = 0.0
        if self.is_last:
            if microbatch.target is None:
                raise ValueError("the last stage needs the targets of its micro-batches")
            own = self.own(microbatch.samples)
            target = microbatch.target
            if len(own) < microbatch.samples:
                target = target[own.start : own.stop]
            with autocast(device, self._mixed):
                loss = criterion(held.outputs[OUTPUT], target)
            value = loss.detach().double()
            if loss.requires_grad:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        else:
            self._backward_of(held.outputs, number, passing, device)
        for border, handover in self._before.items():
            for name, part in passing[border].items():
                if self._has_gradient(border, name, part):
                    tile = held.tiles[name]
                    grad = tile.grad if tile.grad is not None else torch.zeros_like(tile)
                    handover.send_back(grad, part, number)
        return value

    def _backward_of(
        self, outputs: dict[Value, Any], number: int, passing: Passing, device: torch.device
    ) -> None:
        """What is given to several stages gets a gradient from each of them.

        It need not depend on any weight.
        """
        grads: dict[Value, Tensor] = {}
        for border, handover in reversed(self._after.items()):
            for value, part in passing[border].items():
                if self._has_gradient(border, value, part):
                    grad = handover.receive_back(part, number, device)
                    if isinstance(part, SplitShape):
                        grad = part.tile_of(grad, part.pixels[0], self.position.part)
                    grads[value] = grads[value] + grad if value in grads else grad
        reached = [value for value in grads if outputs[value].requires_grad]
        if reached:
            torch.autograd.backward(
                [outputs[value] for value in reached],
                [self._like(outputs[value], grads[value]) for value in reached],
            )

    def _like(self, output: Tensor, grad: Tensor) -> Tensor:
        if isinstance(output, SpatialTensor):
            return SpatialTensor(grad, output.spatial_layout, self.mesh, output.spatial_dims)
        return grad

    def ranks_of(self, samples: Mapping[int, int]) -> Communicator:
        """The ranks of this stage that work on a micro-batch; at the first time all must ask.

        Args:
            samples: of some data replicas.
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
        """Wait until all that was sent has left; the end of a step."""
        for handover in (*self._before.values(), *self._after.values()):
            handover.wait_sent()
