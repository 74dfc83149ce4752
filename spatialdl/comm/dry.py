"""Dry communicator: communications of ranks, simulated by one process on the ``meta`` device.

Moves no data, and records each communication for subscribers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Talk(NamedTuple):
    """One communication of a rank.

    Attributes:
        kind: "exchange" with some neighbours, "sum" or "gather" over all ranks.
        ranks: neighbours of an exchange, else all participating ranks.
        bytes: that this rank would send; its contribution to a sum or gather.
        axis: of the mesh: ranks of the grid, or ranks that divide channels.
    """

    kind: Kind
    ranks: int
    bytes: int
    axis: Axis = "grid"


class Dry(SingleProcess):
    """A communicator of `size` ranks of which one exists; it communicates with no peer.

    Args:
        axis: mesh axis of its ranks.
        processes: virtual ranks of each process; () if each rank is a process. Recorded are
            messages between processes, for all virtual ranks of this rank's process together.
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
        self.process_of = {rank: number for number, some in enumerate(processes) for rank in some}

    def subset(self, ranks: object) -> Dry:
        return self

    def duplicate(self) -> Dry:
        return self

    def nodes(self) -> list[int]:
        return [0] * self.size


_talk_lists: list[list[Talk]] = []


@contextmanager
def record_talks() -> Iterator[list[Talk]]:
    """Context that records simulated communications to a list."""
    talks: list[Talk] = []
    _talk_lists.append(talks)
    try:
        yield talks
    finally:
        _talk_lists.remove(talks)


def record(comm: object, kind: Kind, ranks: int, size: int) -> None:
    """Record a sum or gather, unless backward replays it.

    Args:
        ranks: number of participating ranks, virtual ones included.
        size: bytes of this rank's contribution.
    """
    if replaying():
        return
    if isinstance(comm, Dry) and comm.processes:
        ranks = len(comm.processes)
        if kind == "gather":  # a sum is first reduced within the process
            size *= len(comm.processes[comm.process_of[comm.rank]])
    _record_talk(comm, kind, ranks, size)


def exchange(comm: object, what: Exchange) -> Completed:
    """Record an exchange, of which nothing is moved."""
    if replaying():
        return Completed()
    if isinstance(comm, Dry) and comm.processes:
        _record_talk(comm, "exchange", *_crossing(comm, what))
        return Completed()
    peers = {piece.peer for piece in (*what.outgoing, *what.incoming)}
    _record_talk(comm, "exchange", len(peers), sum(view.nbytes for view in what.leaving()))
    return Completed()


def _record_talk(comm: object, kind: Kind, ranks: int, size: int) -> None:
    axis: Axis = comm.axis if isinstance(comm, Dry) else "grid"
    is_single = isinstance(comm, Dry) and len(comm.processes) == 1
    for talks in [] if is_single else _talk_lists:
        talks.append(Talk(kind, ranks, size, axis))


def _crossing(comm: Dry, what: Exchange) -> tuple[int, int]:
    """Number of processes that this one exchanges with, and bytes that it sends to them."""
    peers, pixels = _crossing_pixels(comm, what.plan, what.adjoint)
    boxed = (one for one in (*what.sends, *what.receives) if not one.box.is_empty)
    one = next(boxed, None)
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
