"""What one program can see of it; `test_ports` and the tests on a cluster have jobs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spatialdl.comm.launch import mpiexec_command

JOB = """
import time
waited = []
time.sleep = waited.append
from spatialdl.comm.initialise import initialise_mpi
initialise_mpi()
initialise_mpi()
from mpi4py import MPI
print(MPI.COMM_WORLD.size, MPI.get_vendor()[0], len(waited))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_message_waits_until_open_mpi_is_up_on_all_ranks(ranks):
    """A rank that was still in MPI_Init crashed when another one's message came."""
    command = [*mpiexec_command(ranks), sys.executable, "-c", JOB]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    lines = told.stdout.splitlines()
    assert len(lines) == ranks
    for line in lines:
        size, *vendor, waits = line.split()
        assert int(waits) == (int(size) > 1 and vendor == ["Open", "MPI"])
