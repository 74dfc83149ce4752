"""Gradients of the stages that a rank holds: averaged, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import average, shard_of
from spatialdl.parallel.placement import Placement

if TYPE_CHECKING:
    from spatialdl.pipeline.sharded import ShardedStage


class Gradients:
    """Those of a pipeline; all its ranks call it together.

    Args:
        stages: by number those of this rank.
        sharded: the same ones, where state is sharded.
        placement: of the pipeline.
        comm: all ranks.
        holders: by stage the ranks that hold it, in whichever copy of the network.
        reducers: the same ranks, as gradients are added up over them.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        sharded: Mapping[int, ShardedStage],
        placement: Placement,
        comm: Communicator,
        holders: Mapping[int, Communicator],
        reducers: Mapping[int, Communicator],
    ) -> None:
        self._stages, self._sharded = stages, sharded
        self._placement, self._comm = placement, comm
        self._holders, self.reducers = holders, reducers

    def average(self) -> None:
        """Average those that backward has added up in all ranks that hold a stage."""
        for stage, module in self._stages.items():
            if stage in self._sharded:
                self._sharded[stage].average()
                continue
            copies = self._placement.widths[stage] * self._placement.data * self._placement.copies
            average(module.parameters(), self.reducers[stage], copies)

    def unscale(self, scale: float) -> bool:
        """Divide all by `scale`, unless one is not finite on any rank.

        Returns:
            Whether all are finite, the same on every rank.
        """
        parameters = (p for stage in self._stages.values() for p in stage.parameters())
        grads = [shard_of(p.grad) for p in parameters if p.grad is not None]
        return unscale_gradients(grads, self._comm, scale)

    def clip(self, limit: float) -> float:
        """Scale all so that their common norm is at most `limit`.

        Returns:
            The norm as it was.
        """
        holders = {stage: comm.size for stage, comm in self._holders.items()}
        if self._sharded:
            holders = {stage: self._placement.widths[stage] for stage in holders}
        return clip_gradients(self._stages, holders, self._comm, limit)


def clip_gradients(
    stages: Mapping[int, nn.Module], holders: Mapping[int, int], comm: Communicator, limit: float
) -> float:
    """Scale all gradients so that their common norm is at most `limit`; all ranks must call it.

    As ``torch.nn.utils.clip_grad_norm_`` does it for a whole network.

    Args:
        stages: by number those of this rank, with averaged gradients.
        holders: how many ranks hold each of them; of sharded ones, each shard.
        comm: all ranks.

    Returns:
        The norm as it was, the same on every rank.
    """
    grads = {
        number: [shard_of(p.grad) for p in stage.parameters() if p.grad is not None]
        for number, stage in stages.items()
    }
    squares = torch.zeros(1, dtype=torch.float64)
    for number, own in grads.items():
        for grad in own:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
            squares += norm.cpu().square() / holders[number]
    norm = float(comm.all_reduce(squares).sqrt())
    factor = limit / (norm + 1e-6)
    if not factor >= 1:  # nor if it is no number
        for own in grads.values():
            for grad in own:
                grad.mul_(factor)
    return norm


def unscale_gradients(grads: Iterable[Tensor], comm: Communicator, scale: float) -> bool:
    """Divide gradients by `scale`, unless one of them is not finite on any rank.

    All ranks of `comm` must call it, and all get the same answer.

    Args:
        grads: of this rank, averaged; of sharded ones the shards.

    Returns:
        Whether all gradients of all ranks are finite.
    """
    grads = list(grads)
    finite = [grad.isfinite().all() for grad in grads]
    overflows = sum(1 for one in finite if not one)
    if float(comm.all_reduce(torch.tensor([overflows], dtype=torch.float64))) > 0:
        return False
    for grad in grads:
        grad.div_(scale)
    return True
