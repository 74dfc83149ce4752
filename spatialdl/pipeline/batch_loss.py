"""Losses that compare the samples of a batch, across micro-batches and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.pipeline.options import Width
from spatialdl.pipeline.own_tile import Criterion
from spatialdl.pipeline.simulate import Lists
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.autocast import wide


class BatchLoss:
    """Loss of a whole batch, split into a criterion for each micro-batch.

    Outputs and targets of the whole batch are gathered between the forwards and the backwards of a
    step, in float64; each rank computes the loss and its gradient. A micro-batch has at most one
    sample on a replica. Rows without a sample have outputs of 0 and targets of NaN.

    Args:
        criterion: of outputs (N, columns) and targets (N, columns); N is replicas times
            micro-batches.
        width: of both.
        mesh: the mesh of the last stage.
    """

    def __init__(self, criterion: Criterion, width: Width, mesh: Mesh) -> None:
        self._criterion, self._width, self._mesh = criterion, width, mesh

    def gather(
        self,
        outputs: Mapping[int, Tensor],
        microbatches: Sequence[Microbatch],
        device: torch.device,
    ) -> dict[int, Criterion]:
        """Return the criterion of each of this rank's micro-batches; collective over the mesh.

        Their values are the loss of the batch. Their gradients, weighted by the shares of the
        micro-batches, add up to its gradient.

        Args:
            outputs: (1, columns) by micro-batch, for those with a sample.
            microbatches: of this rank.

        Raises:
            ValueError: if an output has another shape.
        """
        mesh, width = self._mesh, self._width
        rows = torch.zeros(
            (len(microbatches), mesh.data, width.output + width.target + 1),
            dtype=torch.float64,
            device=device,
        )
        for number, output in outputs.items():
            target = microbatches[number].target
            assert target is not None
            self._check(output)
            if mesh.counts:
                is_there = target.new_ones(1, 1)
                row = [column.detach().double() for column in (wide(output), target, is_there)]
                rows[number, mesh.replica] = torch.cat(row, 1)[0]
        rows = mesh.comm.all_reduce(rows)
        of_all, targets, is_there = torch.split(rows.flatten(0, 1), [*width, 1], 1)
        of_all = of_all.clone().requires_grad_()
        with torch.enable_grad():
            loss = self._criterion(of_all, targets.where(is_there > 0, torch.nan))
        [grads] = torch.autograd.grad(loss, of_all)
        grads = grads.view(len(microbatches), mesh.data, width.output)[:, mesh.replica]
        return {
            number: _Part(loss.detach(), grads[number] / microbatches[number].share)
            for number in outputs
        }

    def _check(self, output: Tensor) -> None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != (1, self._width.output):
            raise ValueError(
                f"the network returns {shape} for a sample, but its loss compares the samples of a "
                f"batch by (1, {self._width.output})"
            )


class _Part:
    """Criterion of a micro-batch, from the known loss and gradient of the batch."""

    def __init__(self, loss: Tensor, grad: Tensor) -> None:
        self._loss, self._grad = loss, grad

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        part = (wide(output).double() * self._grad).sum()
        return self._loss + (part - part.detach())


def check_forwards_first(lists: Lists) -> None:
    """Refuse a schedule that begins a backward before its last forward.

    Raises:
        ValueError: with the reason.
    """
    for actions in lists:
        kinds = [action.kind for action in actions]
        if "backward" in kinds and "forward" in kinds[kinds.index("backward") :]:
            raise ValueError(
                "a loss of a whole batch needs all forwards before the first backward: take the "
                "schedule gpipe with all micro-batches of a step"
            )
