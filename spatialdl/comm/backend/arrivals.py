"""Arrival counters of ranks at a collective, in shared memory of a machine.

MPI waits by polling. Where threads share cores with computation, a thread that polls for a slower
rank takes time from backward. So it sleeps until the other ranks of its machine arrive before it
calls MPI. This affects timing only, never results.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

from mpi4py import MPI

_SHORTEST_S, _LONGEST_S = 20e-6, 500e-6
_WORDS = 8
"""Eight-byte words for each rank: avoids false sharing between counters."""


class Arrivals:
    """A counter for each rank of `comm` on this machine; collective.

    Args:
        comm: communicator whose collectives are counted.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        machine = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
        self._memory = memoryview(_shared(machine, 8 * _WORDS * machine.size)).cast("q")
        self._own = _WORDS * machine.rank
        self._others = [_WORDS * r for r in range(machine.size) if r != machine.rank]
        machine.Free()

    def arrive(self) -> None:
        """Mark that this rank is at its next collective."""
        self._memory[self._own] += 1

    def sleep(self) -> None:
        """Sleep until the other ranks have arrived at this rank's collective."""
        memory, number, pause = self._memory, self._memory[self._own], _SHORTEST_S
        for other in self._others:
            while memory[other] < number:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)


def _shared(machine: MPI.Intracomm, size: int) -> mmap.mmap:
    """Zero-initialised memory shared by the ranks of a machine.

    A file instead of an MPI window: windows of Open MPI print warnings where a network is missing.
    """
    name = None
    if machine.rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="spatialdl-", dir=folder)
        os.truncate(handle, size)
        os.close(handle)
    path = Path(machine.bcast(name))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    machine.Barrier()
    if machine.rank == 0:
        path.unlink()
    return memory
