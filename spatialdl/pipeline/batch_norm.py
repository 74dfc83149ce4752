"""Ranks that share a micro-batch's BatchNorm statistics, and the state that forwards update."""

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
    """Shared statistics and updated state of a pipeline; collective over all its ranks.

    Args:
        placed: the stages of this rank.
        stages: their modules by number; BatchNorm layers get hooks.
        holders: by stage the ranks that hold it.
        placement: of the pipeline.
        over_replicas: whether BatchNorm normalizes over the samples of all data replicas.
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
        self._local: set[int] = set()  # stages whose slices all run on this rank
        self._spectral: list[SpectralNorms] = []
        for stage, module in stages.items():
            if placement.network_copies * placement.batch_parts(stage) > 1:
                self._parameters.append(ForwardParameters(module, units.get(stage, ())))
                keepers = self._keepers(module, holders[stage])
                self._kept[stage] = [self._parameters[-1], *keepers]
            elif microbatches > 1:  # recomputation in backward also updates statistics
                statistics = SliceStatistics(module, SingleProcess(), in_order=True)
                self._kept[stage] = [statistics, BuffersInOrder(module, statistics.modules)]
                self._local.add(stage)
        self._samples: list[dict[int, int]] = []
        # all ranks synchronize or none, even if only some have spectral norms
        spectral = placement.data > 1 and any(comm.allgather(bool(self._spectral)))
        self._synchronizes = self._over_replicas or spectral

    def _keepers(self, stage: nn.Module, comm: Communicator) -> list[_Keeper]:
        statistics, spectral = SliceStatistics(stage, comm), SpectralNorms(stage, comm)
        self._spectral += [spectral] if spectral.modules else []
        apart = {*statistics.modules, *spectral.modules}
        return [statistics, spectral, ForwardBuffers(stage, comm, apart)]

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Agree on the ranks that share each micro-batch of a step."""
        rows = {self._replica: [microbatch.samples for microbatch in microbatches]}
        if self._synchronizes:
            own = torch.tensor([self._replica, *rows[self._replica]])
            rows_of_replicas = gather_over_ranks(
                self._comm, own, "samples of micro-batches"
            ).tolist()
            rows = {replica: row for replica, *row in sorted(rows_of_replicas)}
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
        """Number of a slice in the order of a single process."""
        return microbatch if self._over_replicas else microbatch * self._data + replica

    @contextmanager
    def slice_of(self, placed: StageRuntime, number: int) -> Iterator[None]:
        """Context of the forward and the backward of a stage for a micro-batch."""
        stage = placed.position.stage
        with ExitStack() as stack:
            stack.enter_context(self._over(placed, number))
            if stage in self._kept:
                first = stage in self._local or placed.ranks_of(self._samples[number]).rank == 0
                for keeper in self._kept[stage]:
                    which = self._slice(number, self._replica)
                    stack.enter_context(keeper.slice(which, counts=first))
            yield

    def _over(self, placed: StageRuntime, number: int) -> AbstractContextManager[object]:
        """Context in which BatchNorm normalizes over all shared samples."""
        parts = prod(placed.mesh.grid)
        if not self._over_replicas and placed.mesh.batch == 1:
            return nullcontext()
        return BatchNormOver(placed.ranks_of(self._samples[number]), parts)

    def fold(self, microbatches: int) -> None:
        """At the end of a step, fold its slices into running statistics and other state.

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
