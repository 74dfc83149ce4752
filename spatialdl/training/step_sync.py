"""Where all ranks meet after every step: one sum in which each says what the others must know."""

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
    """All ranks hear of signals, checkpoints, damage, warnings, and where the time went.

    Args:
        course: is told of a signal.
        split: is told of every step.
        callbacks: which may ask for the end of the run.
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
        self._course, self._split = progress, split
        self._callbacks = Callbacks([]) if callbacks is None else callbacks

    def after_step(self, loss: float) -> float:
        """The sum of the ranks' parts of a loss.

        Raises:
            ShardError: a shard is damaged.
        """
        total, *times = self._meet([loss, *self._split.own()])
        self._split.note(times, self._world.size)
        return total

    def between(self) -> None:
        """Where no step was made.

        Raises:
            ShardError: a shard is damaged.
        """
        self._meet([0.0] * (1 + COUNTS))

    def _meet(self, numbers: list[float]) -> list[float]:
        warnings, ends = float(run_log.kept_warnings()), float(self._callbacks.reason is not None)
        own = [*self._writer.status(), self._staging.damage(), warnings, ends, *signals.flags()]
        values = torch.tensor([*numbers, *own], dtype=torch.float64)
        with trace.span("reduce", "the loss"):
            added = noted("the sum of the loss", None, self._world.all_reduce, values)
            sums = [float(value) for value in added]
        found = sums[: len(numbers)]
        busy, failed, damaged, untold, ended, *seen = sums[len(numbers) :]
        if untold:
            run_log.log_warnings(self._world)
        if damaged:
            self._staging.refuse()
        if ended and self._course.ended is None:
            reasons = self._world.allgather(self._callbacks.reason)
            self._course.ended = next(one for one in reasons if one is not None)
        self._course.stopped = self._course.stopped or signals.agreed(seen)
        self._writer.go_on(busy, failed)
        return found
