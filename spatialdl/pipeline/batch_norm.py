"""Which ranks share BatchNorm's statistics of a micro-batch; how what forward updates is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod

import torch
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.forward_buffers import BuffersInOrder, ForwardBuffers
from spatialdl.pipeline.forward_parameters import ForwardParameters, check_unwritten
from spatialdl.pipeline.spectral import SpectralNorms
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime
from spatialdl.pipeline.statistics import SliceStatistics
from spatialdl.spatial.replicas import BatchNormOver

_Keeper = SliceStatistics | SpectralNorms | ForwardParameters | ForwardBuffers | BuffersInOrder


class Sharing:
    """Those of a pipeline; all its ranks make it, and call it together.

    Args:
        placed: the stages of this rank.
        stages: their layers by number; BatchNorm layers get hooks.
        holders: by stage the ranks that hold it.
        placement: of the pipeline.
        over_replicas: whether BatchNorm sees a micro-batch's samples on all data replicas.
        microbatches: in a training step.
        comm: of the pipeline.
        units: by stage the modules whose weights are gathered, where state is sharded.
    """

    def __init__(
        self,
        placed: Sequence[StageRuntime],
        stages: Mapping[int, nn.Module],
        holders: Mapping[int, Communicator],
        placement: Placement,
        over_replicas: bool,
        microbatches: int,
        comm: Communicator,
        units: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        self._comm, self._is_first_step = comm, True
        self._is_divided = placement.network_copies * placement.most_batch_parts > 1
        self._parameters: list[ForwardParameters] = []
        self._data, self._over_replicas = placement.data, over_replicas and placement.data > 1
        self._replica = placed[0].position.replica
        self._kept: dict[int, list[_Keeper]] = {}
        self._alone: set[int] = set()  # stages whose slices are all of this rank
        self._spectral: list[SpectralNorms] = []
        for stage, module in stages.items():
            if placement.network_copies * placement.batch_parts(stage) > 1:
                self._parameters.append(ForwardParameters(module, units.get(stage, ())))
                others = self._keepers(module, holders[stage])
                self._kept[stage] = [self._parameters[-1], *others]
            elif microbatches > 1:  # a layer that runs again in backward counts there, too
                statistics = SliceStatistics(module, SingleProcess(), in_order=True)
                self._kept[stage] = [statistics, BuffersInOrder(module, statistics.modules)]
                self._alone.add(stage)
        self._samples: list[dict[int, int]] = []
        # all ranks ask or none, whichever of them have spectral norms
        spectral = placement.data > 1 and any(comm.allgather(bool(self._spectral)))
        self._asks = self._over_replicas or spectral

    def _keepers(self, stage: nn.Module, comm: Communicator) -> list[_Keeper]:
        statistics, spectral = SliceStatistics(stage, comm), SpectralNorms(stage, comm)
        self._spectral += [spectral] if spectral.modules else []
        apart = {*statistics.modules, *spectral.modules}
        return [statistics, spectral, ForwardBuffers(stage, comm, apart)]

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Agree on the ranks that share each micro-batch of a step."""
        rows = {self._replica: [one.samples for one in microbatches]}
        if self._asks:
            own = torch.tensor([self._replica, *rows[self._replica]])
            everybody = gather_over_ranks(self._comm, own, "samples of micro-batches").tolist()
            rows = {replica: row for replica, *row in sorted(everybody)}
        of_replicas = [{r: row[n] for r, row in rows.items()} for n in range(len(microbatches))]
        self._samples = [
            {r: n for r, n in row.items() if n > 0 and (self._over_replicas or r == self._replica)}
            for row in of_replicas
        ]
        order = {
            self._slice(number, replica)
            for number, row in enumerate(of_replicas)
            for replica, count in row.items()
            if count > 0
        }
        for spectral in self._spectral:
            spectral.begin(sorted(order))

    def _slice(self, microbatch: int, replica: int) -> int:
        """The number of a slice in the order of one process."""
        return microbatch if self._over_replicas else microbatch * self._data + replica

    @contextmanager
    def slice_of(self, placed: StageRuntime, number: int) -> Iterator[None]:
        """Around the forward and the backward of a stage on a micro-batch."""
        stage = placed.position.stage
        with ExitStack() as around:
            around.enter_context(self._over(placed, number))
            if stage in self._kept:
                first = stage in self._alone or placed.ranks_of(self._samples[number]).rank == 0
                for keeper in self._kept[stage]:
                    which = self._slice(number, self._replica)
                    around.enter_context(keeper.slice(which, counts=first))
            yield

    def _over(self, placed: StageRuntime, number: int) -> AbstractContextManager[object]:
        """BatchNorm sees all samples that are shared."""
        parts = prod(placed.mesh.grid)
        if not self._over_replicas and placed.mesh.batch == 1:
            return nullcontext()
        return BatchNormOver(placed.ranks_of(self._samples[number]), parts)

    def fold(self, microbatches: int) -> None:
        """At the end of a step: what its slices come to in the running statistics.

        Raises:
            UnsupportedSpatialOp: on all ranks, if a forward of the first step changes a parameter.
        """
        slices = microbatches * (1 if self._over_replicas else self._data)
        for kept in self._kept.values():
            for keeper in kept:
                keeper.fold(slices)
        if self._is_first_step and self._is_divided:
            check_unwritten(self._comm, self._parameters)
        self._is_first_step = False
