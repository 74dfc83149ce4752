"""What ranks would say to each other, told by one process on the ``meta`` device.

Where nothing is moved, what would have been is noted, if anybody listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from spatialdl.comm.alone import Alone
from spatialdl.comm.tape import replaying

Kind = Literal["exchange", "sum", "gather"]
Axis = Literal["grid", "tensor"]


class Talk(NamedTuple):
    """One thing that a rank would say.

    Attributes:
        kind: "exchange" with some neighbours, "sum" or "gather" over all ranks.
        ranks: neighbours of an exchange, else all ranks that take part.
        bytes: that this rank would send; of a sum or gather, what it brings.
        axis: of which ranks: those of the grid, or those that divide channels.
    """

    kind: Kind
    ranks: int
    bytes: int
    axis: Axis = "grid"


class Dry(Alone):
    """A communicator of `size` ranks of which there is one, and nobody answers.

    Args:
        axis: of the mesh, to which its ranks belong.
    """

    def __init__(self, rank: int, size: int, axis: Axis = "grid") -> None:
        self.rank, self.size, self.axis = rank, size, axis

    def subset(self, ranks: object) -> Dry:
        return self

    def duplicate(self) -> Dry:
        return self

    def nodes(self) -> list[int]:
        return [0] * self.size


_heard: list[list[Talk]] = []


@contextmanager
def listening() -> Iterator[list[Talk]]:
    """A list to which is added what would be said inside."""
    talks: list[Talk] = []
    _heard.append(talks)
    try:
        yield talks
    finally:
        _heard.remove(talks)


def note(comm: object, kind: Kind, ranks: int, size: int) -> None:
    """Tell those who listen; what runs again in backward says nothing twice."""
    if replaying():
        return
    axis = comm.axis if isinstance(comm, Dry) else "grid"
    for talks in _heard:
        talks.append(Talk(kind, ranks, size, axis))
