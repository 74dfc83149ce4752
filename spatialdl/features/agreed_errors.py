"""Mistakes and errors of one rank that all ranks of the command agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spatialdl.comm.communicator import Communicator

FAILED, MISUSED = 1, 2
"""Exit codes: something cannot be read or written; the arguments or files do not fit."""


class AgreedError(Exception):
    """What went wrong on some rank, raised on all.

    Args:
        text: what.
        code: exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def agreeing(world: Communicator) -> Iterator[None]:
    """What raises on some rank raises on all, at the end of the block; of one rank as it is."""
    if world.size == 1:
        yield
        return
    problem: tuple[str, int] | None = None
    try:
        yield
    except OSError as error:
        problem = str(error), FAILED
    except ValueError as error:
        problem = str(error), MISUSED
    found = [one for one in world.allgather(problem) if one is not None]
    if found:
        raise AgreedError(*found[0])
