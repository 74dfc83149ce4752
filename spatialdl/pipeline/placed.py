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

    tile: Tensor
    output: Tensor


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
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        position: Position,
        comm: Communicator,
        lane: Communicator,
        learns: Sequence[bool],
    ) -> None:
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
        shapes: Sequence[HandoverShape],
        image_size: tuple[int, int],
        device: torch.device,
    ) -> Tensor:
        """The output of this stage for a micro-batch, which is on its way to the next one.

        Args:
            shapes: what passes after each stage.
            image_size: global (H, W).

        Raises:
            ValueError: if the first stage is not given its images.
        """
        if self.is_first:
            if microbatch.tile is None:
                raise ValueError("the first stage needs the images of its micro-batches")
            tile = microbatch.tile
            layout: Layout | None = self.mesh.layout((microbatch.samples, *image_size))
        else:
            shape = shapes[self.position.stage - 1]
            tile = self._before.receive(shape, number, device)
            tile.requires_grad_(torch.is_grad_enabled() and self._gives_gradient)
            layout = shape.receiver
        output: Tensor = self.module(self._as_input(_enter(tile), layout))
        if not self.is_last:
            local = output._tile if isinstance(output, SpatialTensor) else output
            self._after.send(local, shapes[self.position.stage], number)
        if torch.is_grad_enabled():
            self._held[number] = _Held(tile, output)
        return output

    def _as_input(self, tile: Tensor, layout: Layout | None) -> Tensor:
        if layout is None or self.mesh.grid == (1, 1):
            return tile
        return from_tile(tile, layout, self.mesh)

    def backward(
        self,
        number: int,
        microbatch: Microbatch,
        shapes: Sequence[HandoverShape],
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
            grad = self._after.receive_back(shapes[self.position.stage], number, device)
            if isinstance(held.output, SpatialTensor):
                grad = SpatialTensor(grad, held.output.spatial_layout, self.mesh)
            torch.autograd.backward([held.output], [grad])
        if self._gives_gradient:
            grad = held.tile.grad if held.tile.grad is not None else torch.zeros_like(held.tile)
            self._before.send_back(grad, shapes[self.position.stage - 1], number)
        return value

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


def _border(placement: Placement, position: Position, lane: Communicator, before: int) -> Handover:
    """The hand-over from stage `before` to the next one; at the ends of the network, of nothing."""
    replica, stage, part, copy = position
    senders, receivers = (
        placement.ranks(s, replica, copy) if 0 <= s < placement.stages else range(0)
        for s in (before, before + 1)
    )
    me = part if stage == before else len(senders) + part
    return Handover(lane, senders, receivers, me, tag=before + 1, tags=placement.stages + 1)
