"""What ranks would say to each other, told by one process on the ``meta`` device.

Where nothing is moved, what would have been is noted, if anybody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from spatialdl.comm.boxed import Exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.replay import replaying
from spatialdl.comm.single_process import Completed, SingleProcess

Kind = Literal["exchange", "sum", "gather"]
Axis = Literal["grid", "tensor"]
Givers = tuple[tuple[int, ...], ...]
"""For each virtual rank of a process those of the same process from which it gets something."""


class DryEvent(NamedTuple):
    """What a virtual rank does of a call: others have their turns while it waits.

    Attributes:
        kind: "bring" comes to it; "wait" for an exchange, or for a sum or gather of all.
        pieces: bytes of what it brings to an exchange, piece by piece.
        givers: of an exchange.
    """

    kind: Literal["bring", "wait", "wait for all"]
    pieces: tuple[int, ...] = ()
    givers: Givers = ()


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


class Dry(SingleProcess):
    """A communicator of `size` ranks of which there is one, and nobody answers.

    Args:
        axis: of the mesh, to which its ranks belong.
        processes: for each process its virtual ranks; () where each rank is a process. What is
            noted is what passes between processes, all virtual ranks of this rank's together.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        axis: Axis = "grid",
        processes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.rank, self.size, self.axis = rank, size, axis
        self.processes = processes
        self.process_of = {one: number for number, some in enumerate(processes) for one in some}

    def subset(self, ranks: object) -> Dry:
        return self

    def duplicate(self) -> Dry:
        return self

    def nodes(self) -> list[int]:
        return [0] * self.size


_heard: list[list[Talk]] = []
_followed: list[Callable[[DryEvent], None]] = []


@contextmanager
def listening() -> Iterator[list[Talk]]:
    """A list to which is added what would be said inside."""
    talks: list[Talk] = []
    _heard.append(talks)
    try:
        yield talks
    finally:
        _heard.remove(talks)


@contextmanager
def following(tell: Callable[[DryEvent], None]) -> Iterator[None]:
    """Within it `tell` is called where a virtual rank comes to a call, and where it waits."""
    _followed.append(tell)
    try:
        yield
    finally:
        _followed.remove(tell)


def note(comm: object, kind: Kind, ranks: int, size: int) -> None:
    """Tell those who listen of a sum or gather; what runs again in backward says nothing twice.

    Args:
        ranks: that take part, virtual ones included.
        size: bytes that this rank brings.
    """
    if replaying():
        return
    if isinstance(comm, Dry) and comm.processes:
        _follow(DryEvent("bring"))
        _follow(DryEvent("wait for all"))
        ranks = len(comm.processes)
        if kind == "gather":  # a sum is taken within the process first
            size *= len(comm.processes[comm.process_of[comm.rank]])
    _tell(comm, kind, ranks, size)


def exchange(comm: object, what: Exchange) -> Completed:
    """Tell those who listen of an exchange of which nothing is moved."""
    if replaying():
        return Completed()
    if isinstance(comm, Dry) and comm.processes:
        pieces = tuple(view.nbytes for view in what.leaving())
        _follow(DryEvent("bring", pieces, _givers(comm, what.plan, what.adjoint)))
        _tell(comm, "exchange", *_crossing(comm, what))
        return _Awaited()
    peers = {piece.peer for piece in (*what.outgoing, *what.incoming)}
    _tell(comm, "exchange", len(peers), sum(view.nbytes for view in what.leaving()))
    return Completed()


class _Awaited(Completed):
    def wait(self) -> None:
        _follow(DryEvent("wait"))


def _follow(event: DryEvent) -> None:
    for tell in _followed:
        tell(event)


def _tell(comm: object, kind: Kind, ranks: int, size: int) -> None:
    axis: Axis = comm.axis if isinstance(comm, Dry) else "grid"
    alone = isinstance(comm, Dry) and len(comm.processes) == 1
    for talks in [] if alone else _heard:
        talks.append(Talk(kind, ranks, size, axis))


def _crossing(comm: Dry, what: Exchange) -> tuple[int, int]:
    """Processes with which this one exchanges something, and bytes that it sends to them."""
    peers, pixels = _crossing_pixels(comm, what.plan, what.adjoint)
    held = (one for one in (*what.sends, *what.receives) if not one.box.is_empty)
    one = next(held, None)
    return peers, 0 if one is None else pixels * one.tensor.nbytes // prod(one.box.shape)


@lru_cache(maxsize=4096)
def _crossing_pixels(comm: Dry, plan: Plan, adjoint: bool) -> tuple[int, int]:
    process = np.array([comm.process_of[rank] for rank in range(comm.size)])
    here, links = process[comm.rank], plan.links.T if adjoint else plan.links
    mine, theirs = (plan.needed, plan.owned) if adjoint else (plan.owned, plan.needed)
    givers, takers = links.nonzero()
    leaves, arrives = process[givers] == here, process[takers] == here
    pixels = sum(
        prod(mine[giver].intersect(theirs[taker]).shape)
        for giver, taker in zip(givers[leaves & ~arrives], takers[leaves & ~arrives], strict=True)
    )
    peers = {*process[takers[leaves]], *process[givers[arrives]]} - {here}
    return len(peers), pixels


@lru_cache(maxsize=4096)
def _givers(comm: Dry, plan: Plan, adjoint: bool) -> Givers:
    here = comm.processes[comm.process_of[comm.rank]]
    links = (plan.links.T if adjoint else plan.links)[np.ix_(here, here)]
    return tuple(tuple(map(int, links[:, taker].nonzero()[0])) for taker in range(len(here)))
