"""A job as a scheduler sees it: started, watched from outside, killed, and gone.

Who is killed, how and when is drawn from a seed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import NamedTuple
from uuid import uuid4

import psutil

from spatialdl.comm.launch import mpiexec_command
from spatialdl.training.checkpoints.folder import FOLDER
from spatialdl.training.signals import MARKER, STOPPING
from tests.soak.outcome import SEEN
from tests.vision import import_path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0
"""Nothing here takes so long; then a job counts as hanging."""

_MARK, _RANK = "SPATIALDL_SOAK_JOB", "OMPI_COMM_WORLD_RANK"
_LOOK_EVERY_S = 0.005


class Job:
    """A life of a run. Leaving the block kills what is left of it.

    Args:
        folder: of all lives; the run directory is ``run`` in it, shards are staged to ``disk``.
        number: of this life.
        ranks: how many are started by an ``mpiexec``; None leaves that to the command.
        words: of the command line.

    Attributes:
        log: what it has said.
    """

    def __init__(self, folder: Path, number: int, ranks: int | None, words: Sequence[str]) -> None:
        self.run_dir, self.log = folder / "run", folder / f"life-{number:02d}.log"
        self._id, self._old_rows = uuid4().hex, _inode(self.run_dir / "metrics.csv")
        launcher = [] if ranks is None else mpiexec_command(ranks)
        (folder / "tmp").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PYTHONPATH": import_path(ROOT),
            "TMPDIR": str(folder / "tmp"),
            SEEN: str(folder / f"seen-{number:02d}"),
            _MARK: self._id,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "spatialdl.train", *words],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started = time.monotonic()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()

    # --- what is seen from outside

    def begun_at(self) -> int | None:
        """The step after which this life goes on; None while it has not said so."""
        said = self.log.read_text()
        found = re.search(r"resuming after step (\d+) from", said)
        if found:
            return int(found[1])
        return 0 if "starting a new run" in said else None

    def steps(self) -> int:
        """That this life has made."""
        begun = self.begun_at()
        if begun is None or _inode(self.run_dir / "metrics.csv") == self._old_rows:
            return 0
        return last_step(self.run_dir) - begun

    def writes_checkpoint(self) -> bool:
        return any((self.run_dir / FOLDER).glob(".step-*.tmp"))

    def stages(self) -> bool:
        return any((self.run_dir.parent / "disk").glob(".spatialdl-*/jobs/*"))

    def ended_well(self) -> bool:
        """By its own word: come to its end, or stopped with a checkpoint."""
        return any((self.run_dir / name).exists() for name in ("summary.json", MARKER))

    # --- processes

    def processes(self) -> list[psutil.Process]:
        """All that belong to it, whoever their parents are."""
        return [one for one in psutil.process_iter() if _variable(one, _MARK) == self._id]

    def ranks(self) -> dict[int, psutil.Process]:
        """Of those that are there; not the helpers that they start."""
        found = {one: rank for one in self.processes() if (rank := _variable(one, _RANK))}
        return {int(rank): one for one, rank in found.items() if _parent(one) not in found}

    def victim(self, name: str) -> psutil.Process:
        """The process of a name: the one that was started, the ``launcher``, or ``rank 2``.

        Who is not there yet is stood for by the one that was started.
        """
        started, ranks = psutil.Process(self.process.pid), self.ranks()
        if name.startswith("rank"):
            return ranks.get(int(name.split()[1]), started)
        if name == "launcher" and ranks:
            return _parent(next(iter(ranks.values()))) or started
        return started

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for something that it does by itself; False if it ends before.

        Raises:
            TimeoutError: if it does nothing.
        """
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"nothing happens:\n{self.log.read_text()[-3000:]}")
            time.sleep(_LOOK_EVERY_S)
        return True

    def after(self, seconds: float) -> bool:
        """Let it run for so long from now; False if it ends before."""
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() >= end)

    def kill(self, name: str, number: int) -> bool:
        """Send a signal; False if there is nobody any more."""
        with suppress(psutil.NoSuchProcess):
            if self.process.poll() is None:
                self.victim(name).send_signal(number)
                return True
        return False

    def wait(self) -> int:
        """Its exit code, once every process of it is gone.

        Raises:
            TimeoutError: if one is not.
        """
        code = self.process.wait(PATIENCE_S)
        left = psutil.wait_procs(self.processes(), PATIENCE_S)[1]
        if left:
            raise TimeoutError(f"still there: {left}\n{self.log.read_text()[-3000:]}")
        return code


def last_step(run_dir: Path) -> int:
    """Of ``metrics.csv``."""
    try:
        rows = (run_dir / "metrics.csv").read_text().splitlines()
    except OSError:
        return 0
    return int(rows[-1].split(",")[0] or 0) if len(rows) > 1 else 0


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _variable(process: psutil.Process, name: str) -> str | None:
    """Of its environment; None if there is none, or it has ended."""
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):
        return None


def _parent(process: psutil.Process) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        return process.parent()
    return None


# --- kills

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
    signals, moments, kills = (*STOPPING, *CRASHES), list(MOMENTS), list[Kill]()
    if count >= sum(MOMENTS.values()):
        moments = [moment for moment, share in MOMENTS.items() for _ in range(share)]
    while len(kills) < count:
        draw.shuffle(moments)
        for moment in moments:
            when = moment, draw.randint(1, 4), draw.random()
            kills.append(
                Kill(*when, draw.choice(victims), draw.choice(signals), draw.random() < 0.5)
            )
    return kills[:count]
