"""Which ranks share BatchNorm's statistics of a micro-batch, and how the running ones are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod

import torch
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.pipeline.placed import Microbatch, PlacedStage
from spatialdl.pipeline.statistics import SliceStatistics
from spatialdl.placement import Placement
from spatialdl.spatial.replicas import BatchNormOver


class Sharing:
    """Those of a pipeline; all its ranks make it, and call it together.

    Args:
        placed: the stages of this rank.
        stages: their layers by number; BatchNorm layers get hooks.
        holders: by stage the ranks that hold it.
        placement: of the pipeline.
        over_replicas: whether BatchNorm sees a micro-batch's samples on all data replicas.
    """

    def __init__(
        self,
        placed: Sequence[PlacedStage],
        stages: Mapping[int, nn.Module],
        holders: Mapping[int, Communicator],
        placement: Placement,
        over_replicas: bool,
    ) -> None:
        self._data, self._over_replicas = placement.data, over_replicas and placement.data > 1
        self._replica, self._mesh = placed[0].position.replica, placed[0].mesh
        self._statistics = {
            stage: SliceStatistics(module, holders[stage])
            for stage, module in stages.items()
            if placement.data * placement.copies * placement.batch_parts(stage) > 1
        }
        self._samples: list[dict[int, int]] = []

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Agree on who shares which of the micro-batches of a step."""
        self._samples = self._samples_of(microbatches)

    @contextmanager
    def slice_of(self, placed: PlacedStage, number: int) -> Iterator[None]:
        """Around the forward of a stage: also whose running statistics it adds to."""
        with ExitStack() as around:
            statistics = self._statistics.get(placed.position.stage)
            if statistics is not None:
                first = placed.ranks_of(self._samples[number]).rank == 0
                which = number if self._over_replicas else number * self._data + self._replica
                around.enter_context(statistics.slice(which, counts=first))
            around.enter_context(self.over(placed, number))
            yield

    def over(self, placed: PlacedStage, number: int) -> AbstractContextManager[object]:
        """Around forward and backward: BatchNorm sees all samples that are shared."""
        parts = prod(placed.mesh.grid)
        if not self._over_replicas and placed.mesh.batch == 1:
            return nullcontext()
        return BatchNormOver(placed.ranks_of(self._samples[number]), parts)

    def fold(self, microbatches: int) -> None:
        """At the end of a step: what its slices come to in the running statistics."""
        slices = microbatches * (1 if self._over_replicas else self._data)
        for statistics in self._statistics.values():
            statistics.fold(slices)

    def _samples_of(self, microbatches: Sequence[Microbatch]) -> list[dict[int, int]]:
        """For each micro-batch the replicas that share its statistics, and their samples."""
        if not self._over_replicas:
            return [{self._replica: microbatch.samples} for microbatch in microbatches]
        own = torch.tensor([microbatch.samples for microbatch in microbatches])
        everybody = gather_over_ranks(self._mesh.comm, own, "samples of micro-batches")
        of_replicas = everybody[:: self._mesh.size // self._mesh.data].T.tolist()
        return [{r: count for r, count in enumerate(row) if count > 0} for row in of_replicas]
