"""Step synchronisation: one all-reduce per step that shares the state of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence

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


# --- time of a step


PARTS: tuple[str, ...] = ("compute", "halo", "hand_over", "reduce", "data")
COLUMNS: tuple[str, ...] = ("halo", "hand_over", "reduce")
"""Columns of ``metrics.csv``, which already has rank 0's wait for data."""

COUNTS = 1 + len(trace.WAITS)


class TimeSplit:
    """Seconds of all ranks between step synchronisations.

    A wait in a synchronisation counts in the following step. On a GPU, waits are those of the
    host, which may wait for earlier work of the GPU. Waits inside FSDP count as computation.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._steps, self._elapsed = 0, 0.0
        self._total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._began = 0.0

    def restart(self) -> None:
        """Discard the time since the last synchronisation."""
        trace.counted()
        self._began = time.perf_counter()

    def own(self) -> list[float]:
        """Seconds of this rank since the last call, total and per wait; to be all-reduced."""
        now = time.perf_counter()
        elapsed, self._began = now - self._began, now
        waits = trace.counted()
        return [elapsed, *(waits.get(kind, 0.0) for kind in trace.WAITS)]

    def note(self, sums: Sequence[float], ranks: int) -> None:
        """Record a step from the sums of all ranks' `own`."""
        elapsed, *waits = sums
        seconds = dict(zip(PARTS[1:], waits, strict=True))
        seconds["compute"] = max(0.0, elapsed - sum(waits))
        self.last = {part: seconds[part] / elapsed if elapsed else 0.0 for part in PARTS}
        self._steps += 1
        if self._steps == 2:  # drop the first step, a warm-up, once there is another
            self._elapsed, self._total = 0.0, dict.fromkeys(PARTS, 0.0)
        self._elapsed += elapsed / ranks
        for part in PARTS:
            self._total[part] += seconds[part] / ranks

    def summary(self) -> dict[str, float]:
        """Shares of the time and seconds per step, means over ranks and steps."""
        if not self._elapsed:
            return {}
        steps = max(1, self._steps - 1)
        shares = {part: self._total[part] / self._elapsed for part in PARTS}
        return {"seconds_per_step": self._elapsed / steps, **shares}
