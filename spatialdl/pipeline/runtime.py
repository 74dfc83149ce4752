"""Running a schedule: this rank's stage, micro-batch by micro-batch.

All modes of parallelism without a second copy of a stage are this one runtime: one stage on one
rank is ordinary training, one stage on a grid is spatial parallelism, several replicas are data
parallelism, several stages are a pipeline, or layer parallelism if there is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator, as_communicator
from spatialdl.comm.gradients import average
from spatialdl.comm.handover import Handover, HandoverShape
from spatialdl.layout import Layout
from spatialdl.mesh import Mesh, Placement, dry_mesh, split_mesh
from spatialdl.pipeline.partition import cut, meta_copy
from spatialdl.pipeline.schedule import SCHEDULES, Action, forward_only
from spatialdl.pipeline.statistics import ReplicaStatistics
from spatialdl.random import keyed
from spatialdl.spatial.gather import gather_before as gather
from spatialdl.spatial.tensor import SpatialTensor, from_tile

if TYPE_CHECKING:
    from mpi4py import MPI

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Microbatch:
    """What a rank brings to one micro-batch of its replica.

    Attributes:
        samples: how many, on all ranks of the replica alike; 0 is left out by all of them.
        weight: with which its mean loss counts in this replica's objective.
        tile: (N, C, h, w), this rank's box of the images; on the first stage only.
        target: (N,), on the last stage only.
    """

    samples: int
    weight: float
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


class Pipeline:
    """This rank's stage of a network that is spread over the ranks of `comm`.

    Args:
        model: the whole network, the same on every rank.
        placement: how many ranks each axis takes; fits the size of `comm`.
        image_size: global (channels, H, W) of the images.
        names: layers before which to cut, see `pipeline.partition.cut`.
        schedule: name of the schedule.
        gather_before: modules that get whole images, see `spatial.gather`.
        recompute: whether blocks run again in backward, see `spatial.recompute`.
        seed: of the random numbers that the network draws in training.

    Attributes:
        stage: the layers of this rank, with their own names.
        mesh: the ranks of the stage.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        comm: Communicator | MPI.Intracomm,
        criterion: Criterion,
        image_size: tuple[int, int, int],
        names: Sequence[str] | None = None,
        schedule: str = "gpipe",
        device: torch.device | None = None,
        *,
        gather_before: str | Sequence[str] = (),
        recompute: bool = False,
        seed: int = 0,
    ) -> None:
        self.placement, self.criterion, self.image_size = placement, criterion, image_size
        self.seed, self._step = seed, 0
        comm = as_communicator(comm)
        self.position = placement.position(comm.rank)
        self.device = device or torch.device("cpu")
        gather(model, gather_before)
        stages = cut(model, placement.widths, names, (1, *image_size), recompute)
        self._dry_stages = [meta_copy(stage) for stage in stages[:-1]]  # nothing follows the last
        self.dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        self._trains = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        self.stage = stages[self.position.stage].to(self.device)
        self.mesh: Mesh = split_mesh(
            placement, self.position.stage, comm.split(self.position.stage, comm.rank)
        )
        self._before, self._after = self._borders(comm.duplicate())
        self._statistics = ReplicaStatistics(self.stage, self.mesh) if placement.data > 1 else None
        self._schedule = SCHEDULES[schedule]
        self._shapes: dict[int, list[HandoverShape]] = {}

    @property
    def is_first(self) -> bool:
        return self.position.stage == 0

    @property
    def is_last(self) -> bool:
        return self.position.stage == self.placement.stages - 1

    def train_step(self, microbatches: Sequence[Microbatch], step: int) -> float:
        """Forward and backward of all micro-batches; averaged gradients are left in the stage.

        Args:
            step: number of the optimizer step; each draws random numbers of its own.

        Returns:
            The sum of weight * loss over the micro-batches of this replica on the last stage; 0
            elsewhere.
        """
        self.stage.train()
        self.stage.zero_grad()
        self._step = step
        held: dict[int, _Held] = {}
        total = 0.0
        for action in self._actions(self._schedule, microbatches):
            number = action.microbatch
            if action.kind == "forward":
                with self._random(number):
                    held[number] = self._forward(number, microbatches[number])
            else:
                total += self._backward(number, microbatches[number], held.pop(number))
        self._wait_sent()
        average(self.stage.parameters(), self.mesh)
        if self._statistics is not None:
            self._statistics.fold([microbatch.samples > 0 for microbatch in microbatches])
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Outputs (N, ...) of all micro-batches that have samples, on the last stage."""
        self.stage.eval()
        outputs = [
            self._forward(action.microbatch, microbatches[action.microbatch]).output
            for action in self._actions(forward_only, microbatches)
        ]
        self._wait_sent()
        return outputs if self.is_last else []

    def _random(self, number: int) -> AbstractContextManager[object]:
        """Random numbers of a micro-batch: those of one process that accumulates over slices."""
        piece = number * self.placement.data + self.position.replica
        return keyed(self.seed, self._step, piece)

    def _actions(
        self,
        schedule: Callable[[int, int], list[list[Action]]],
        microbatches: Sequence[Microbatch],
    ) -> list[Action]:
        actions = schedule(self.placement.stages, len(microbatches))[self.position.stage]
        return [action for action in actions if microbatches[action.microbatch].samples > 0]

    def _forward(self, number: int, microbatch: Microbatch) -> _Held:
        shapes = self.handover_shapes(microbatch.samples)
        if self.is_first:
            if microbatch.tile is None:
                raise ValueError("the first stage needs the images of its micro-batches")
            tile = microbatch.tile
            layout: Layout | None = self.mesh.layout((microbatch.samples, *self.image_size[1:]))
        else:
            shape = shapes[self.position.stage - 1]
            tile = self._before.receive(shape, number, self.device)
            tile.requires_grad_(torch.is_grad_enabled() and self._returns_gradient(-1))
            layout = shape.receiver
        output = self.stage(self._as_input(_enter(tile), layout))
        if not self.is_last:
            self._after.send(_local(output), shapes[self.position.stage], number)
        return _Held(tile, output)

    def _as_input(self, tile: Tensor, layout: Layout | None) -> Tensor:
        if layout is None or self.mesh.grid == (1, 1):
            return tile
        return from_tile(tile, layout, self.mesh)

    def _backward(self, number: int, microbatch: Microbatch, held: _Held) -> float:
        shapes = self.handover_shapes(microbatch.samples)
        value = 0.0
        if self.is_last:
            if microbatch.target is None:
                raise ValueError("the last stage needs the targets of its micro-batches")
            loss = self.criterion(held.output, microbatch.target) * microbatch.weight
            value = loss.item()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        elif self._returns_gradient(0):
            grad = self._after.receive_back(shapes[self.position.stage], number, self.device)
            self._backward_from(held.output, grad)
        if not self.is_first and self._returns_gradient(-1):
            grad = held.tile.grad if held.tile.grad is not None else torch.zeros_like(held.tile)
            self._before.send_back(grad, shapes[self.position.stage - 1], number)
        return value

    def _backward_from(self, output: Tensor, grad: Tensor) -> None:
        if isinstance(output, SpatialTensor):
            grad = SpatialTensor(grad, output.spatial_layout, self.mesh)
        torch.autograd.backward([output], [grad])

    def _returns_gradient(self, border: int) -> bool:
        """Does a gradient pass the border before (-1) or after (0) this stage?

        It follows from the whole network, so that both sides agree: it does if anything before
        the border learns.
        """
        return any(self._trains[: self.position.stage + 1 + border])

    def _wait_sent(self) -> None:
        self._before.wait_sent()
        self._after.wait_sent()

    def _borders(self, comm: Communicator) -> tuple[Handover, Handover]:
        """Hand-overs from the stage before and to the stage after; unused at the ends."""
        replica, stage, part = self.position

        def border(first: int, me: int) -> Handover:
            ends = [
                self.placement.ranks(s, replica) if 0 <= s < self.placement.stages else range(0)
                for s in (first, first + 1)
            ]
            return Handover(comm, ends[0], ends[1], me, tag=first + 1)

        before = self.placement.widths[stage - 1] + part if stage > 0 else part
        return border(stage - 1, before), border(stage, part)

    def handover_shapes(self, samples: int) -> list[HandoverShape]:
        """What passes each border for a micro-batch of `samples`.

        Found by running the stages without data and without talking, on every rank alike.
        """
        if samples not in self._shapes:
            self._shapes[samples] = self._dry_run(samples)
        return self._shapes[samples]

    @torch.no_grad()
    def _dry_run(self, samples: int) -> list[HandoverShape]:
        shapes: list[HandoverShape] = []
        grids = self.placement.grids
        x: Tensor = torch.empty((samples, *self.image_size), dtype=self.dtype, device="meta")
        layout: Layout | None = Layout.even((samples, *self.image_size[1:]), grids[0])
        for stage, dry in enumerate(self._dry_stages):
            output = dry(_meta_input(x, layout, grids[stage]))
            shapes.append(_handover_shape(output, stage, self.placement))
            x = torch.empty(shapes[-1].shape, dtype=shapes[-1].dtype, device="meta")
            layout = shapes[-1].receiver
        return shapes


def _meta_input(x: Tensor, layout: Layout | None, grid: tuple[int, int]) -> Tensor:
    if layout is None or grid == (1, 1):
        return x
    samples, height, width = layout.boxes[0].shape
    tile = x.new_empty((samples, *x.shape[1:-2], height, width))
    return SpatialTensor(tile, layout, dry_mesh(grid))


def _handover_shape(output: object, stage: int, placement: Placement) -> HandoverShape:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"stage {stage} ends with a {type(output).__name__}: a network can be cut only where "
            "one tensor passes"
        )
    grid, next_grid = placement.grids[stage], placement.grids[stage + 1]
    sender = output.spatial_layout if isinstance(output, SpatialTensor) else None
    receiver = None
    is_map = output.dim() == 4 and output.shape[-2] * output.shape[-1] > 1
    if sender is not None or (is_map and grid == (1, 1) and next_grid != (1, 1)):
        size = (output.shape[0], output.shape[-2], output.shape[-1])
        sender = sender or Layout.even(size, (1, 1))
        receiver = sender if grid == next_grid else Layout.even(size, next_grid)
    return HandoverShape(tuple(output.shape), output.dtype, sender, receiver)


def _local(output: Tensor) -> Tensor:
    return output._tile if isinstance(output, SpatialTensor) else output
