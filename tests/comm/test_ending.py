"""Jobs that end in the middle of something: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command

ROOT = Path(__file__).resolve().parents[2]


def ended(code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    kept_back = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [*launcher, sys.executable, "-c", code],
        env={**os.environ, **kept_back},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("end", ["end_job(5)", "end_job_for_sure()"])
def test_what_was_printed_before_the_end_is_not_lost(end):
    """Python keeps it back where nobody reads along, and `os._exit` throws it away."""
    done = ended(
        "import sys\n"
        "from spatialdl.comm.ending import end_job, end_job_for_sure\n"
        "sys.stderr.reconfigure(line_buffering=False, write_through=False)\n"
        "print('last word', end='')\n"
        "print('last complaint', end='', file=sys.stderr)\n"
        f"{end}\n"
        "print('never')\n"
    )
    assert done.returncode == (5 if "5" in end else 1)
    assert (done.stdout, done.stderr) == ("last word", "last complaint")


def test_an_end_that_is_stuck_is_an_end():
    """Here in a pipe that is full and that nobody reads."""
    done = ended(
        "import os, sys\n"
        "from spatialdl.comm import ending\n"
        "reads, writes = os.pipe()\n"
        "os.set_blocking(writes, False)\n"
        "try:\n"
        "    while os.write(writes, b'-' * 4096): pass\n"
        "except BlockingIOError:\n"
        "    os.set_blocking(writes, True)\n"
        "sys.stdout = os.fdopen(writes, 'w')\n"
        "print('does not fit')\n"
        "ending._SURELY_S = 0.2\n"
        "ending.end_job_for_sure()\n"
    )
    assert done.returncode == 1, done.stderr


RANKS = """
import sys
from mpi4py import MPI
from spatialdl.comm.ending import end_job
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:
    print("rank 1 leaves", end="")
    end_job(3)
world.recv()
"""


def test_other_ranks_end_too():
    done = ended(RANKS, *mpiexec_command(2))
    assert done.returncode == 3
    assert "rank 1 leaves" in done.stdout
