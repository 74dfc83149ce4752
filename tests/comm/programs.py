"""Programs of users on real ranks: written to a folder, started by mpiexec as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from spatialdl.comm.launch import mpiexec_command

ROOT = Path(__file__).resolve().parents[2]
ENDS_S = 200
"""Far more than any of them needs; a program that hangs fails its test."""


def run_program(
    folder: Path, program: str, *arguments: str, ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks, and return its exit code and what it printed to both streams."""
    (folder / "program.py").write_text(dedent(program))
    launcher = ("OMPI_COMM", "PMI", "PRTE_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(launcher)}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        **variables,
    }
    return subprocess.run(
        [*mpiexec_command(ranks), sys.executable, "program.py", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
