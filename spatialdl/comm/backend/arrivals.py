"""Which ranks have come to a collective, told in memory that the ranks of a machine share.

MPI waits by asking again and again. Where threads share cores with what is computed, one that waits
so for a slower rank takes the time that backward needs. So before it calls MPI it sleeps until the
others of its machine have come. This chooses the moment only: no result depends on it.
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
"""Of eight bytes for each rank: counters that are far apart do not disturb each other."""


class Arrivals:
    """A counter for each rank of `comm` on this machine; all ranks make it together.

    Args:
        comm: whose collectives are counted.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        machine = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
        self._memory = memoryview(_shared(machine, 8 * _WORDS * machine.size)).cast("q")
        self._own = _WORDS * machine.rank
        self._others = [_WORDS * r for r in range(machine.size) if r != machine.rank]
        machine.Free()

    def come(self) -> None:
        """This rank is at its next collective."""
        self._memory[self._own] += 1

    def sleep(self) -> None:
        """Return when the others have come as far as this rank."""
        memory, number, pause = self._memory, self._memory[self._own], _SHORTEST_S
        for other in self._others:
            while memory[other] < number:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)


def _shared(machine: MPI.Intracomm, size: int) -> mmap.mmap:
    """Memory of zeros that the ranks of a machine share, until the last of them lets go of it.

    A file rather than a window of MPI: those of Open MPI complain where a network is missing.
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
