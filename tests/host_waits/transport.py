"""MPI in which no rank answers: everything that is asked of it is counted, and at once done.

What the package does on top of MPI is its own `comm.mpi`. All ranks bring what this one brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from spatialdl.comm.exchange_strategies import STRATEGIES
from spatialdl.comm.mpi import MpiCommunicator
from tests.host_waits.device import ADDRESSES
from tests.host_waits.ledger import Ledger


class _NoAnswer(MPI.Intracomm):
    """The calls of mpi4py."""

    rank, size = 0, 1
    ledger: Ledger

    def barrier(self) -> None:
        self.ledger.note("objects")

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self.ledger.note("objects")
        return obj

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        self.ledger.note("objects")
        return [sendobj] * self.size if root == self.rank else None

    def allgather(self, sendobj: Any) -> list[Any]:
        self.ledger.note("objects")
        return [sendobj] * self.size

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        self.ledger.note("objects")
        total = sendobj
        for _ in range(self.size - 1):
            total = op(total, sendobj)
        return total

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        memory, count, kind = recvbuf
        self.ledger.note("collectives", memory.nbytes)
        if memory.address < ADDRESSES:
            np.frombuffer(memory, kind.typestr, count)[:] *= self.size

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> MPI.Request:
        self.Allreduce(sendbuf, recvbuf, op)
        return MPI.REQUEST_NULL

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self.ledger.note("collectives", sendbuf.nbytes)
        if sendbuf.address < ADDRESSES:
            rows = np.frombuffer(recvbuf, np.uint8).reshape(self.size, -1)
            rows[:] = np.frombuffer(sendbuf, np.uint8)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        _, count, kind = buf
        self.ledger.note("messages", count * kind.Get_size())
        return MPI.REQUEST_NULL

    def Irecv(self, buf: Any, source: int = 0, tag: int = 0) -> MPI.Request:
        return MPI.REQUEST_NULL


class CountedMpi(MpiCommunicator, _NoAnswer):
    """One rank of `size`, of which there is no other."""

    strategy = next(iter(STRATEGIES))
    world_ranks: Sequence[int] = ()  # type: ignore[assignment]

    def __new__(cls, ledger: Ledger, rank: int, ranks: Sequence[int]) -> CountedMpi:
        made: CountedMpi = super().__new__(cls, MPI.COMM_SELF)
        made.ledger, made.rank, made.size = ledger, rank, len(ranks)
        made.world_ranks = tuple(ranks)
        return made

    def subset(self, ranks: Sequence[int]) -> CountedMpi:
        members = [self.world_ranks[rank] for rank in ranks]
        return CountedMpi(self.ledger, members.index(self.world_ranks[self.rank]), members)

    def duplicate(self) -> CountedMpi:
        return CountedMpi(self.ledger, self.rank, self.world_ranks)

    def nodes(self) -> list[int]:
        return [0] * self.size
