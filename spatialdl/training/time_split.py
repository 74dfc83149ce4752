"""Time of a step, split into computation and waits for other ranks or data."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spatialdl.comm import trace

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
