"""Training commands on real ranks, which tests stop and kill."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from torch import Tensor, nn

from spatialdl.comm.launch import launched, mpiexec_command
from tests.comm.programs import ROOT, environment
from tests.training.checkpoints.runs import TINY, network

FOR_EVER = [*TINY, "data.validation_samples=0", "trainer.max_steps=1000000"]
RANK = re.compile(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMI_RANK|RANK)=(\d+)\0")
ENDS_S = 120
"""torch's agent waits 30 s for a process that takes no SIGTERM."""

GONE_S = 5
"""In which the ranks of a job that has ended are gone."""


def by_mpiexec(ranks: int) -> list[str]:
    return [*mpiexec_command(ranks), sys.executable, "-m", "spatialdl.train"]


def by_torchrun(ranks: int) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*agent, f"--nproc-per-node={ranks}", "-m", "spatialdl.train"]


def by_itself() -> list[str]:
    return [sys.executable, "-m", "spatialdl.train"]


def with_failing(how: str, rank: int = 1) -> list[str]:
    target = "++model._target_=tests.comm.running.failing"
    return [target, f"++model.how={how}", f"++model.rank={rank}"]


class Run:
    """A command that has made its first step.

    Attributes:
        ranks: process ids, by rank.
    """

    def __init__(self, process: subprocess.Popen[str], ranks: dict[int, int]) -> None:
        self.process, self.ranks = process, ranks
        self._gone = {rank: os.pidfd_open(pid) for rank, pid in ranks.items()}

    def close(self) -> None:
        for descriptor in self._gone.values():
            os.close(descriptor)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.ranks[rank], number)

    def end(self) -> str:
        """What it has said when it ends; no rank is left then."""
        said = self.process.communicate(timeout=ENDS_S)[0]
        assert self.process.returncode != 0, said
        for rank, gone in self._gone.items():
            assert select.select([gone], [], [], GONE_S)[0], f"rank {rank} is still there"
        return said


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@contextmanager
def running(words: list[str], run_dir: Path, *overrides: str) -> Iterator[Run]:
    """A run that goes on for ever."""
    with subprocess.Popen(
        [*words, *FOR_EVER, *overrides, f"hydra.run.dir={run_dir}"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = []
            for line in process.stdout or ():
                said.append(line)
                if " step " in line or "- step 1 of" in line:
                    break
            else:
                pytest.fail("".join(said))
            with closing(Run(process, ranks_below(process.pid))) as run:
                yield run
        finally:
            for pid in (*ranks_below(process.pid).values(), process.pid):
                if is_alive(pid):
                    os.kill(pid, 9)


def ranks_below(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that a launcher has started, by rank."""
    found: dict[int, int] = {}
    for pid in (launcher, *below(launcher)):
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            rank = RANK.search(Path(f"/proc/{pid}/environ").read_bytes())
            if rank and b"spatialdl.train" in words and b"torch.distributed.run" not in words:
                found.setdefault(int(rank[1]), pid)
    return found


def below(parent: int) -> list[int]:
    """Process ids of the children of a process, and of theirs, parents first."""
    found = [parent]
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found[1:]


class Fails(nn.Module):
    """Fails in a forward pass on one rank."""

    def __init__(self, how: str, rank: int, call: int) -> None:
        super().__init__()
        self.how, self.rank, self.left = how, rank, call

    def forward(self, x: Tensor) -> Tensor:
        info = launched()
        if x.device.type == "meta":  # recorded, where state that changes is refused
            return x
        self.left -= 1
        if self.left == 0 and info is not None and info.rank == self.rank:
            if self.how == "raises":
                raise ZeroDivisionError("this rank has had enough")
            if number := {"stops": signal.SIGSTOP, "dies": signal.SIGKILL}.get(self.how):
                os.kill(os.getpid(), number)
            signal.pause()
        return x


def failing(
    num_classes: int = 3, in_channels: int = 3, how: str = "raises", rank: int = 1, call: int = 5
) -> nn.Sequential:
    return nn.Sequential(Fails(how, rank, call), *network(num_classes, in_channels))
