"""Contexts of forwards and backwards: random numbers, and statistics and state that ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod

import torch
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.forward_state import ForwardState
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime
from spatialdl.pipeline.statistics import SliceStatistics
from spatialdl.spatial.random import keyed
from spatialdl.spatial.replicas import BatchNormOver


class StepContext:
    """Random numbers, shared statistics and updated state of a pipeline's steps and evaluations.

    Collective over all its ranks, which begin and end them together. Random numbers and
    statistics match a single process that accumulates over the slices of a batch: micro-batch by
    micro-batch, replica by replica within it.

    Args:
        placed: the stages of this rank.
        stages: their modules by number; BatchNorm layers get hooks.
        holders: by stage the ranks that hold it.
        placement: of the pipeline.
        over_replicas: whether BatchNorm normalizes over the samples of all data replicas.
        microbatches: in a training step.
        comm: of the pipeline.
        units: by stage the modules whose weights are gathered, where state is sharded.
        seed: of the random numbers that the network draws.
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
        seed: int,
    ) -> None:
        self._comm, self._seed, self._step = comm, seed, 0
        self._evaluates = False
        self._data, self._over_replicas = placement.data, over_replicas and placement.data > 1
        self._replica = placed[0].position.replica
        self._kept: dict[int, tuple[SliceStatistics, ForwardState]] = {}
        self._local: set[int] = set()  # stages whose slices all run on this rank
        for stage, module in stages.items():
            is_local = placement.network_copies * placement.batch_parts(stage) == 1
            if is_local and microbatches == 1:
                continue
            own: Communicator = SingleProcess() if is_local else holders[stage]
            statistics = SliceStatistics(module, own, in_order=is_local)
            state = ForwardState(
                *(module, own, statistics.modules, microbatches), units.get(stage, ())
            )
            self._kept[stage] = statistics, state
            self._local |= {stage} if is_local else set()
        self._samples: list[dict[int, int]] = []

    def begin(self, microbatches: Sequence[Microbatch], step: int | None = None) -> None:
        """Begin a step or the evaluation of a batch; agree on the ranks that share micro-batches.

        Args:
            step: number of the step, from 0; None for an evaluation. Those that follow a step
                count -1, -2 ..., so that its weights are evaluated with the same random numbers
                whatever came before.
        """
        self._evaluates = step is None
        self._step = min(self._step, 0) - 1 if step is None else step
        rows = {self._replica: [microbatch.samples for microbatch in microbatches]}
        if self._over_replicas:
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
        for _, state in self._kept.values():
            state.begin(self._evaluates)

    def _slice(self, microbatch: int, replica: int) -> int:
        """Number of a slice in the order of a single process."""
        return microbatch if self._over_replicas else microbatch * self._data + replica

    @contextmanager
    def forward(self, placed: StageRuntime, number: int, microbatch: Microbatch) -> Iterator[None]:
        """Context of a stage's forward of a micro-batch."""
        piece = number * self._data + self._replica
        if microbatch.size is not None:  # a replica has at most one image, in any micro-batch
            piece = microbatch.place
        own = placed.own(microbatch.samples)
        divided = own if len(own) < microbatch.samples else None
        with keyed(self._seed, self._step, piece, divided), self.slice_of(placed, number):
            yield

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
        """At the end, fold the slices of the batch into running statistics and other state."""
        slices = microbatches * (1 if self._over_replicas else self._data)
        for statistics, state in self._kept.values():
            statistics.fold(slices, self._evaluates)
            state.fold()
