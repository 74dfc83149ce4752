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
from torch import Tensor

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

    def nodes(self) -> list[int]:
        return [0] * self.size

    def all_reduce(self, values: Tensor) -> Tensor:
        self.record("sum", values.nbytes)
        return values.clone()

    def all_gather(self, values: Tensor) -> Tensor:
        """Record the gather; every rank has this rank's values."""
        self.record("gather", values.nbytes)
        return values.expand(self.size, *values.shape).clone()

    def start_exchange(self, exchange: Exchange) -> Completed:
        """Record an exchange, of which nothing is moved."""
        if self._records():
            peers = {piece.peer for piece in (*exchange.outgoing, *exchange.incoming)}
            count, size = len(peers), sum(view.nbytes for view in exchange.leaving())
            if self.processes:
                count, size = _crossing(self, exchange)
            self._tell(Talk("exchange", count, size, self.axis))
        return Completed()

    def record(self, kind: Kind, size: int) -> None:
        """Record a sum or gather over all ranks, unless backward replays it.

        Args:
            size: bytes of this rank's contribution.
        """
        if self.size == 1 or not self._records():
            return
        ranks = len(self.processes) or self.size
        if self.processes and kind == "gather":  # a sum is first reduced within the process
            size *= len(self.processes[self.process_of[self.rank]])
        self._tell(Talk(kind, ranks, size, self.axis))

    def _records(self) -> bool:
        return bool(_talk_lists) and len(self.processes) != 1 and not replaying()

    def _tell(self, talk: Talk) -> None:
        for talks in _talk_lists:
            talks.append(talk)


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
