"""Errors of one rank, raised on all ranks; options that are parsed on one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
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


def parse_once(world: Communicator, parse: Callable[[], Namespace]) -> Namespace | int:
    """Options that rank 0 parses, so that help and errors are printed once; collective.

    Returns:
        The options; the exit code after help, or of a misused option.
    """
    found: Namespace | int = 0
    with agreeing(world):
        if world.rank == 0:
            try:
                found = parse()
            except SystemExit as stop:
                found = stop.code if isinstance(stop.code, int) else 0
    agreed: Namespace | int = world.bcast(found)
    return agreed
