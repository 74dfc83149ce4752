"""One stage of one copy of the network as a rank holds it: its forward, its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.handover import Handover, HandoverShape
from spatialdl.layout import Layout
from spatialdl.mesh import Mesh, Placement, Position, stage_mesh
from spatialdl.pipeline.shapes import Passing, tensors_of
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.tensor import SpatialTensor, from_tile

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Microbatch:
    """What a rank brings to one micro-batch of its replica.

    Attributes:
        samples: how many, on all ranks of the replica alike; 0 is left out by all of them.
        share: of the whole batch's samples that these are; their mean loss counts so much.
        tile: (N, C, h, w), this rank's box of the images; on the first stage only.
        target: (N,), on the last stage only.
    """

    samples: int
    share: float
    tile: Tensor | None = None
    target: Tensor | None = None


@dataclass
class _Held:
    """What the backward of a micro-batch needs."""

    tiles: Sequence[Tensor]
    output: Any


class _Enter(torch.autograd.Function):
    """A stage may begin with an operation in place, which autograd forbids on a leaf."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor) -> Tensor:
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _enter(tile: Tensor) -> Tensor:
    entered: Tensor = _Enter.apply(tile)  # type: ignore[no-untyped-call]
    return entered


class PlacedStage:
    """A stage at work on this rank; the ranks of its mesh make it together.

    Args:
        module: its layers.
        comm: all ranks of the placement.
        lane: the same, for hand-overs only.
        learns: per stage of the network whether it has anything to learn.
        recompute: whether only its input is kept for backward, and it runs again there.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        position: Position,
        comm: Communicator,
        lane: Communicator,
        learns: Sequence[bool],
        recompute: bool,
    ) -> None:
        self._recompute = recompute
        self.module, self.position = module, position
        self.is_first = position.stage == 0
        self.is_last = position.stage == placement.stages - 1
        self.mesh: Mesh = stage_mesh(placement, position, comm)
        # a gradient passes a border if anything before it learns: so that both sides agree,
        # it follows from the whole network
        self._gets_gradient = any(learns[: position.stage + 1]) and not self.is_last
        self._gives_gradient = any(learns[: position.stage])
        self._before = _border(placement, position, lane, position.stage - 1)
        self._after = _border(placement, position, lane, position.stage)
        self._held: dict[int, _Held] = {}
        self._some: dict[tuple[int, ...], Communicator] = {}

    def forward(
        self,
        number: int,
        microbatch: Microbatch,
        passing: Sequence[Passing],
        image_size: tuple[int, int],
        device: torch.device,
    ) -> Any:
        """The output of this stage for a micro-batch, which is on its way to the next one.

        Args:
            passing: what passes after each stage.
            image_size: global (H, W).

        Raises:
            ValueError: if the first stage is not given its images.
        """
        if self.is_first:
            if microbatch.tile is None:
                raise ValueError("the first stage needs the images of its micro-batches")
            tiles = [microbatch.tile]
            layout = self.mesh.layout((microbatch.samples, *image_size))
            entering: Any = self._as_input(microbatch.tile, layout)
        else:
            parts, is_tuple = passing[self.position.stage - 1]
            tiles = [self._received(part, number, device) for part in parts]
            inputs = (self._as_input(t, p.receiver) for t, p in zip(tiles, parts, strict=True))
            entering = tuple(inputs) if is_tuple else next(inputs)
        if self._recompute:
            output = recompute(self.module, entering, modules=[self.module])
        else:
            output = self.module(entering)
        if not self.is_last:
            outputs = tensors_of(output, self.position.stage)
            for one, part in zip(outputs, passing[self.position.stage].parts, strict=True):
                local = one._tile if isinstance(one, SpatialTensor) else one
                self._after.send(local, part, number)
        if torch.is_grad_enabled():
            self._held[number] = _Held(tiles, output)
        return output

    def _received(self, part: HandoverShape, number: int, device: torch.device) -> Tensor:
        tile = self._before.receive(part, number, device)
        learns = torch.is_grad_enabled() and self._gives_gradient and _has_gradient(part)
        return tile.requires_grad_(learns)

    def _as_input(self, tile: Tensor, layout: Layout | None) -> Tensor:
        tile = _enter(tile)
        if layout is None or self.mesh.grid == (1, 1):
            return tile
        return from_tile(tile, layout, self.mesh)

    def backward(
        self,
        number: int,
        microbatch: Microbatch,
        passing: Sequence[Passing],
        criterion: Criterion,
        weight: float,
        device: torch.device,
    ) -> float:
        """The backward of a micro-batch; its gradient is on its way to the stage before.

        Args:
            weight: with which the mean loss counts in the objective.

        Returns:
            The mean loss on the last stage, else 0.

        Raises:
            ValueError: if the last stage is not given its targets.
        """
        held = self._held.pop(number)
        value = 0.0
        if self.is_last:
            if microbatch.target is None:
                raise ValueError("the last stage needs the targets of its micro-batches")
            loss = criterion(held.output, microbatch.target)
            value = loss.item()
            if loss.requires_grad:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        elif self._gets_gradient:
            self._backward_of(held.output, number, passing[self.position.stage], device)
        if self._gives_gradient:
            parts = passing[self.position.stage - 1].parts
            for tile, part in zip(held.tiles, parts, strict=True):
                if _has_gradient(part):
                    grad = tile.grad if tile.grad is not None else torch.zeros_like(tile)
                    self._before.send_back(grad, part, number)
        return value

    def _backward_of(
        self, output: Any, number: int, passing: Passing, device: torch.device
    ) -> None:
        """What was given need not depend on any weight, as an image that is passed on."""
        outputs, grads = [], []
        for one, part in zip(tensors_of(output, self.position.stage), passing.parts, strict=True):
            if not _has_gradient(part):
                continue
            grad = self._after.receive_back(part, number, device)
            if one.requires_grad:
                if isinstance(one, SpatialTensor):
                    grad = SpatialTensor(grad, one.spatial_layout, self.mesh)
                outputs.append(one)
                grads.append(grad)
        if outputs:
            torch.autograd.backward(outputs, grads)

    def ranks_of(self, replicas: tuple[int, ...]) -> Communicator:
        """The ranks of this stage in some data replicas; at the first time they must all ask."""
        if len(replicas) == self.mesh.data:
            return self.mesh.comm
        if replicas not in self._some:
            width = self.mesh.size // self.mesh.data
            ranks = [replica * width + part for replica in replicas for part in range(width)]
            self._some[replicas] = self.mesh.comm.subset(ranks)
        return self._some[replicas]

    def wait_sent(self) -> None:
        """Wait until all that was sent has left; the end of a step."""
        self._before.wait_sent()
        self._after.wait_sent()


def _has_gradient(part: HandoverShape) -> bool:
    return part.dtype.is_floating_point or part.dtype.is_complex


def _border(placement: Placement, position: Position, lane: Communicator, before: int) -> Handover:
    """The hand-over from stage `before` to the next one; at the ends of the network, of nothing."""
    replica, stage, part, copy = position
    senders, receivers = (
        placement.ranks(s, replica, copy) if 0 <= s < placement.stages else range(0)
        for s in (before, before + 1)
    )
    me = part if stage == before else len(senders) + part
    return Handover(lane, senders, receivers, me, tag=before + 1, tags=placement.stages + 1)
