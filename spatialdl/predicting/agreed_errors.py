"""Errors of one rank, raised on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spatialdl.comm.communicator import Communicator


class AgreedError(ValueError):
    """A ValueError or OSError of one rank, raised on all.

    Args:
        text: message of the error.
        is_io: whether it was an OSError.
    """

    def __init__(self, text: str, is_io: bool) -> None:
        super().__init__(text)
        self.is_io = is_io


@contextmanager
def agreeing(world: Communicator) -> Iterator[None]:
    """Raise an error of any rank on all ranks at the end of the block; one rank: unchanged.

    Ranks that fail must communicate in the block as the others do.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    problem = None if own is None else (str(own), isinstance(own, OSError))
    problems = [one for one in world.allgather(problem) if one is not None]
    if own is not None and (world.size == 1 or not isinstance(own, ValueError | OSError)):
        raise own
    if problems:
        raise AgreedError(*problems[0]) from own
