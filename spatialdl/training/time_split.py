"""What the time of a step goes to: computing, and waiting for others or for data."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spatialdl.comm import trace

PARTS: tuple[str, ...] = ("compute", "halo", "hand_over", "reduce", "data")
COLUMNS: tuple[str, ...] = ("halo", "hand_over", "reduce")
"""Of ``metrics.csv``, which has the wait for data of rank 0 anyway."""

COUNTS = 1 + len(trace.WAITS)


class TimeSplit:
    """Seconds of all ranks from one meeting after a step to the next one.

    What a rank waits in a meeting counts in the step that follows. On a GPU a wait is what the host
    waits for, which may be the GPU's work of before. What FSDP waits for counts as computing.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._steps, self._elapsed = 0, 0.0
        self._total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._began = 0.0

    def restart(self) -> None:
        """What was since the last meeting belongs to no step."""
        trace.counted()
        self._began = time.perf_counter()

    def own(self) -> list[float]:
        """Of this rank: seconds since the last call, and those of each wait; to be added up."""
        now = time.perf_counter()
        elapsed, self._began = now - self._began, now
        waits = trace.counted()
        return [elapsed, *(waits.get(kind, 0.0) for kind in trace.WAITS)]

    def note(self, sums: Sequence[float], ranks: int) -> None:
        """A step is over; the sums are those of all ranks' `own`."""
        elapsed, *waits = sums
        seconds = dict(zip(PARTS[1:], waits, strict=True))
        seconds["compute"] = max(0.0, elapsed - sum(waits))
        self.last = {part: seconds[part] / elapsed if elapsed else 0.0 for part in PARTS}
        self._steps += 1
        if self._steps == 2:  # the first one warms up, and is left out if there are others
            self._elapsed, self._total = 0.0, dict.fromkeys(PARTS, 0.0)
        self._elapsed += elapsed / ranks
        for part in PARTS:
            self._total[part] += seconds[part] / ranks

    def summary(self) -> dict[str, float]:
        """Shares of the time, means over ranks and steps, and the seconds of a step."""
        if not self._elapsed:
            return {}
        steps = max(1, self._steps - 1)
        shares = {part: self._total[part] / self._elapsed for part in PARTS}
        return {"seconds_per_step": self._elapsed / steps, **shares}
