"""Gradients of the stages that a rank holds: averaged, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import average, shard_of
from spatialdl.pipeline.clipping import clip_gradients
from spatialdl.pipeline.overflow import unscale_gradients
from spatialdl.placement import Placement

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
