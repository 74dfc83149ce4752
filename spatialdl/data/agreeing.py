"""Ranks that write one data set agree on how it went, so that none waits for one that failed."""

from __future__ import annotations

from typing import Any, Protocol

from spatialdl.errors import ShardError


class Comm(Protocol):
    """What of a communicator of mpi4py is used."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """Processes."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """What each has given."""


def agree(comm: Comm, error: BaseException | None) -> None:
    """All ranks call it, each with what went wrong there, if anything did.

    Raises:
        ShardError: something went wrong elsewhere; says what and where.
        BaseException: `error` itself, where there is one.
    """
    said = None if error is None else f"{type(error).__name__}: {error}"
    problems = comm.allgather(said)
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ShardError(f"rank {rank} failed, so no data set was written: {problem}")
