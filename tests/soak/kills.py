"""Who is killed, how and when: drawn from a seed."""

from __future__ import annotations

import random
import signal
import time
from signal import Signals
from typing import NamedTuple

from spatialdl.training.signals import STOPPING
from tests.soak.job import Job, last_step

CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
MOMENTS = {"start-up": 4, "staging": 2, "step": 6, "checkpoint": 5, "validation": 3}
"""And how many of twenty kills come then."""

VALIDATE_EVERY = 4


class Kill(NamedTuple):
    """One of them.

    Attributes:
        moment: of `MOMENTS`.
        steps: that are made before it, but for a kill while the job starts.
        delay: from 0 to 1, of a time that depends on the moment.
        victim: ``command`` (which was started), ``launcher``, or ``rank 2``.
        by_mpiexec: whether the job is started by an ``mpiexec``, or starts its ranks itself.
    """

    moment: str
    steps: int
    delay: float
    victim: str
    signal: Signals
    by_mpiexec: bool

    def __str__(self) -> str:
        by = "mpiexec" if self.by_mpiexec else "command"
        when = f"{self.moment} after {self.steps} steps, {self.delay:.2f}"
        return f"{self.signal.name} to {self.victim} of {by} ({when})"

    def of(self, ranks: int) -> Kill:
        """The same of a job of fewer ranks."""
        name, _, rank = self.victim.partition(" ")
        victim = f"{name} {int(rank) % ranks}" if rank else name
        return self._replace(victim=victim, by_mpiexec=self.by_mpiexec and ranks > 1)

    @property
    def asks(self) -> bool:
        """Whether it asks a job, which is under way, to stop with a checkpoint and code 0."""
        if self.victim.startswith("rank"):
            return self.signal in STOPPING
        if self.victim == "command" and not self.by_mpiexec:
            return self.signal in STOPPING
        return self.signal == signal.SIGUSR1  # of the others a launcher makes an end

    def reached(self, job: Job, start_s: float) -> bool:
        """Wait for its moment; False if the job ends before.

        Args:
            start_s: how long a job takes to its first step.
        """
        if self.moment == "start-up":
            end = time.monotonic() + self.delay * start_s
            return job.until(lambda: time.monotonic() >= end or job.steps() > 0)
        if self.moment == "staging":
            return job.until(job.stages) and job.after(self.delay * 0.2)
        if not job.until(lambda: job.steps() >= self.steps):
            return False
        if self.moment == "checkpoint":
            return job.until(job.writes_checkpoint)
        if self.moment == "validation":
            due = job.until(lambda: last_step(job.run_dir) % VALIDATE_EVERY == 0)
            return due and job.after(self.delay * 0.1)
        return job.after(self.delay * 0.2)


def drawn(seed: int, count: int) -> list[Kill]:
    """So many kills of a job of four ranks."""
    draw = random.Random(seed)
    victims = [*(f"rank {rank}" for rank in range(4)), "launcher", "command"]
    moments = list(MOMENTS)
    if count >= sum(MOMENTS.values()):
        moments = [moment for moment, share in MOMENTS.items() for _ in range(share)]
    kills = []
    while len(kills) < count:
        draw.shuffle(moments)
        kills += [
            Kill(
                moment,
                draw.randint(1, 4),
                draw.random(),
                draw.choice(victims),
                draw.choice((*STOPPING, *CRASHES)),
                draw.random() < 0.5,
            )
            for moment in moments
        ]
    return kills[:count]
