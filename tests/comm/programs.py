"""Programs in processes of their own, on ranks or alone, which tests run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.vision import import_path

ROOT = Path(__file__).resolve().parents[2]
ENDS_S = 280
"""Far more than any of them needs; a program that hangs fails its test."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_OF_LAUNCHERS = ("OMPI_COMM", "PMI", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC")


def environment(**variables: str) -> dict[str, str]:
    """What a process gets: no launcher's variables, one thread, these sources."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": import_path(ROOT),
        **variables,
    }


def run(
    *words: str,
    launcher: Sequence[str] = (),
    cwd: Path = ROOT,
    typed: str | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, and return its exit code and what it printed."""
    return subprocess.run(
        [*launcher, sys.executable, *words],
        cwd=cwd,
        env=environment(**variables),
        input=typed,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
