"""Step synchronisation: one all-reduce per step that shares the state of all ranks."""

from __future__ import annotations

import torch

from spatialdl.comm import trace
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.waiting import noted
from spatialdl.training import signals
from spatialdl.training.callbacks import Callbacks
from spatialdl.training.checkpoints.writing import Writer
from spatialdl.training.console import run_log
from spatialdl.training.progress import TrainingProgress
from spatialdl.training.staging import Staging
from spatialdl.training.time_split import COUNTS, TimeSplit


class StepSync:
    """Shares signals, checkpoint states, damaged shards, warnings and times among all ranks.

    Args:
        world: all ranks.
        writer: writer of checkpoints.
        staging: copies of shards.
        progress: gets the signal or reason that stops the run.
        split: gets the times of every step.
        callbacks: may request the end of the run.
    """

    def __init__(
        self,
        world: Communicator,
        writer: Writer,
        staging: Staging,
        progress: TrainingProgress,
        split: TimeSplit,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._world, self._writer, self._staging = world, writer, staging
        self._progress, self._split = progress, split
        self._callbacks = Callbacks([]) if callbacks is None else callbacks

    def after_step(self, loss: float) -> float:
        """Synchronise after a step and sum the ranks' parts of the loss.

        Raises:
            ShardError: if a shard is damaged.
        """
        total, *times = self._sync([loss, *self._split.own()])
        self._split.note(times, self._world.size)
        return total

    def between(self) -> None:
        """Synchronise without a step.

        Raises:
            ShardError: if a shard is damaged.
        """
        self._sync([0.0] * (1 + COUNTS))

    def _sync(self, numbers: list[float]) -> list[float]:
        warnings, ends = float(run_log.kept_warnings()), float(self._callbacks.reason is not None)
        own = [*self._writer.status(), self._staging.damage(), warnings, ends, *signals.flags()]
        values = torch.tensor([*numbers, *own], dtype=torch.float64)
        with trace.span("reduce", "the loss"):
            reduced = noted("the sum of the loss", None, self._world.all_reduce, values)
            sums = [float(value) for value in reduced]
        totals = sums[: len(numbers)]
        busy, failed, damaged, buffered, ended, *seen = sums[len(numbers) :]
        if buffered:
            run_log.log_warnings(self._world)
        if damaged:
            self._staging.raise_damage()
        if ended and self._progress.ended is None:
            reasons = self._world.allgather(self._callbacks.reason)
            self._progress.ended = next(one for one in reasons if one is not None)
        self._progress.stopped = self._progress.stopped or signals.agreed(seen)
        self._writer.advance(busy, failed)
        return totals
