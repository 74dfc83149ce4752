"""Errors of one rank, raised on all ranks of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spatialdl.comm.communicator import Communicator

FAILED, MISUSED = 1, 2
"""Exit codes: an I/O error; invalid arguments or files."""


class AgreedError(Exception):
    """An error of one rank, raised on all.

    Args:
        text: message of the error.
        code: exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def agreeing(world: Communicator) -> Iterator[None]:
    """Raise an error of any rank on all ranks at the end of the block; one rank: unchanged."""
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
    problems = [one for one in world.allgather(problem) if one is not None]
    if problems:
        raise AgreedError(*problems[0])
