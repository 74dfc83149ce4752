"""Commands on several nodes, as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.running import FOR_EVER
from tests.training.checkpoints.runs import TINY, table

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, "-m", "spatialdl.train"]
SRUN = ["srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--quiet"]
ENVIRONMENT = {
    **os.environ,
    # the environment of these tests, activated: scripts for users say only `python`
    "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
}
ONE = [*TINY, "data.validation_samples=0", "trainer.report=false"]
SP_PP = [*ONE, "parallel=sp+pp", "parallel.microbatches=2"]
"""Words of the command: a run in one process, and one on three ranks."""

NODES = ["node1", "node2", "node3"]
PATIENCE_S = 240.0
"""Nothing here takes so long; then a test gives up."""


def run(words: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=ENVIRONMENT | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def quoted(word: str) -> str:
    return f"'{word}'"


def answer(*words: str) -> str:
    return run([*words], ROOT).stdout.strip()


def until(condition: Callable[[], object], otherwise: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that Slurm does by itself."""
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(otherwise)
        time.sleep(0.1)


def resume_drained() -> None:
    """What an administrator does: Slurm gives up nodes whose tasks report to one that hangs."""
    for line in answer("sinfo", "-h", "-N", "-o", "%N %T").splitlines():
        node, state = line.split()
        if state.startswith("drain"):
            answer("scontrol", "update", f"nodename={node}", "state=resume")


class Job:
    """A batch job, cancelled at the end of the `with`; its output is in ``job.log``.

    Args:
        options: of sbatch, before the name of the script and its arguments.
    """

    def __init__(self, cwd: Path, *options: str, **environment: str) -> None:
        self.log = cwd / "job.log"
        words = ["sbatch", "--parsable", f"--output={self.log}", *options]
        sent = run(words, cwd, **environment)
        assert sent.returncode == 0, sent.stderr
        self.id = sent.stdout.strip()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_over():
            answer("scancel", self.id)
            self.until(self.is_over)

    def told(self, key: str) -> str:
        """What Slurm says of it, such as ``JobState``."""
        found = [w for w in answer("scontrol", "show", "job", self.id).split() if "=" in w]
        return dict(word.split("=", 1) for word in found)[key]

    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return answer("scontrol", "show", "hostnames", self.told("NodeList")).split()

    def is_over(self) -> bool:
        return answer("squeue", "-h", "-j", self.id, "-o", "%T") == ""

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that Slurm or a job does by itself."""

        def is_met() -> bool:
            if condition():
                return True
            if self.is_over() and not condition():
                pytest.fail(f"the job ended: {self.told('JobState')}\n{self.said()}")
            return False

        until(is_met, f"job {self.id} does nothing")

    def says(self, text: str, times: int = 1) -> None:
        """Wait for a text in the job's output."""
        self.until(lambda: self.said().count(text) >= times)

    def ends(self, state: str = "COMPLETED", restarts: int | None = None) -> None:
        """Wait for its end in a state."""
        self.until(self.is_over)
        assert self.told("JobState") == state, self.said()
        assert restarts is None or self.told("Restarts") == str(restarts)


def steps(run_dir: Path) -> list[int]:
    return [int(row["step"]) for row in table(run_dir / "metrics.csv")]


# --- a job of which a rank hangs

TIMEOUT = "comm.timeout=8"
HANGING = [*FOR_EVER, *SP_PP[-2:], TIMEOUT, "hydra.run.dir=run"]
WAITS = (
    r"rank (\d) on (\w+), step \d+.*: waits for \d+ s in (?:.*: )?"
    r"(exchange|hand-over|all-reduce)\b.* with ranks? ([\d, ]+)"
)


def assert_hang_is_told(said: str, nodes: list[str], lost: int) -> None:
    """All others say with their names what they wait for, and one blames the right one."""
    told = {int(rank): (node, peers) for rank, node, _, peers in re.findall(WAITS, said)}
    others = [rank for rank in range(len(nodes)) if rank != lost]
    assert [told[rank][0] for rank in others] == [nodes[rank] for rank in others], said
    assert any(str(lost) in told[rank][1] for rank in others), said
    assert f"longer than {TIMEOUT}" in said
    place = rf"process \d+ on {nodes[lost]}"
    blame = rf"no report from rank {lost} \({place}\), which is stopped, dead, "
    assert len(re.findall(blame, said)) == 1, said
