"""What virtual ranks of several processes bring to one call, put together over the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.plan import MessageSizes
from spatialdl.comm.waiting import noted


class Sent(NamedTuple):
    """What a virtual rank brings to an exchange.

    Attributes:
        pieces: by the rank to which they go, in their order.
    """

    rank: int
    exchange: Exchange
    pieces: dict[int, list[Tensor]]


class GivenUp(Exception):
    """A step was given up, as the run is told to stop; weights and buffers are as before it."""


class Across:
    """From the virtual ranks of this process to those of the others; all make it together.

    Args:
        comm: the processes.
        ranks: for each process the numbers of its virtual ranks, of each as many.

    Attributes:
        stops: whether this process is told to stop. If one is, a later call raises `GivenUp`, the
            same one in all processes. None where others than these wait for what they do.
    """

    stops: Callable[[], bool] | None = None

    def __init__(self, comm: Communicator, ranks: Sequence[Sequence[int]]) -> None:
        self._comm = comm.duplicate()
        self._under_way: list[Crossing] = []
        self._told: tuple[Tensor, Pending] | None = None
        self.here = tuple(ranks[comm.rank])
        self._process = {one: process for process, some in enumerate(ranks) for one in some}
        # places in what is gathered, in the order of virtual ranks
        gathered = [one for some in ranks for one in some]
        self._order = [gathered.index(one) for one in range(len(gathered))]

    def is_here(self, rank: int) -> bool:
        return rank in self.here

    def objects(self, own: list[bytes]) -> list[bytes]:
        """Of all virtual ranks, from those of this process."""
        self._ask()
        gathered = [one for some in self._comm.allgather(own) for one in some]
        return [gathered[place] for place in self._order]

    def sum(self, own: Tensor) -> Tensor:
        self._ask()
        return self._comm.all_reduce(own)

    def stack(self, own: list[Tensor]) -> Tensor:
        """(virtual ranks, ...), from those of this process."""
        self._ask()
        return self._comm.all_gather(torch.stack(own)).flatten(0, 1)[self._order]

    def exchange(self, sent: list[Sent]) -> Crossing:
        """Start to move what passes between processes; what goes both ways has one order."""
        self._ask()
        leaving = [
            (self._process[to], one.rank, to, piece)
            for one in sent
            for to, pieces in one.pieces.items()
            if not self.is_here(to)
            for piece in pieces
        ]
        arriving = [
            (self._process[piece.peer], piece.peer, one.rank, view)
            for one in sent
            for piece, view in zip(one.exchange.incoming, one.exchange.landing(), strict=True)
            if not self.is_here(piece.peer)
        ]
        for some in (leaving, arriving):
            some.sort(key=lambda entry: entry[:3])  # stable: pieces of a pair keep their order
        # those that only send are waited for by nobody, and their messages must stay in memory
        self._under_way = [one for one in self._under_way if not one.is_done()]
        crossing = Crossing(self._comm, leaving, arriving, sent[0].exchange.device)
        self._under_way.append(crossing)
        return crossing

    def finish(self) -> None:
        """Wait until all that was sent has left; when virtual ranks of this process are done."""
        for one in self._under_way:
            one.wait()
        self._under_way = []
        if self._told is not None:
            self._told[1].wait()
            self._told = None

    def _ask(self) -> None:
        """What the call before has asked all processes is known now; and ask again.

        Raises:
            GivenUp: one of them was told to stop.
        """
        if self.stops is None:
            return
        if self._told is not None:
            (told, pending), self._told = self._told, None
            noted("agreeing to stop", self._comm.world_ranks, pending.wait)
            if told[0] > 0:
                raise GivenUp
        with _disable_current_modes():
            told = torch.tensor([float(self.stops())])
            self._told = told, self._comm.start_all_reduce(told)


_Entry = tuple[int, int, int, Tensor]
"""The other process, who sends, who receives, and what."""


class Crossing:
    """Pieces under way to and from other processes, one message for each."""

    def __init__(
        self,
        comm: Communicator,
        leaving: Sequence[_Entry],
        arriving: Sequence[_Entry],
        device: torch.device,
    ) -> None:
        self._comm, self._arriving = comm, arriving
        sends, self._receives = _rooms(leaving), _rooms(arriving)
        for entry, place in _places(leaving, sends):
            place.copy_(entry[-1])
        plan = MessageSizes(_counts(sends), _counts(self._receives))
        route = Route(range(comm.size), 0)
        exchange = Exchange(plan, _held(sends), _held(self._receives), device, route=route)
        self._pending = comm.start_exchange(exchange)
        self._found: dict[int, dict[int, list[Tensor]]] | None = None

    def is_done(self) -> bool:
        return self._found is not None or self._pending.is_done()

    def wait(self) -> None:
        """Until what is sent has left, and what is received is there."""
        noted("exchange of virtual ranks", self._comm.world_ranks, self._pending.wait)

    def arrived(self, rank: int) -> dict[int, list[Tensor]]:
        """What a virtual rank has got, by giver; waits until all of this process is there."""
        if self._found is None:
            self.wait()
            self._found = {}
            for (_, giver, taker, _view), place in _places(self._arriving, self._receives):
                self._found.setdefault(taker, {}).setdefault(giver, []).append(place)
            self._arriving, self._receives = (), {}
        return self._found.pop(rank, {})


def _rooms(entries: Sequence[_Entry]) -> dict[int, Tensor]:
    """By process the memory (1, elements) of its message.

    The transport knows its address: nobody who watches operations may move it away.
    """
    counts: dict[int, int] = {}
    for process, _, _, piece in entries:
        counts[process] = counts.get(process, 0) + piece.numel()
    with _disable_current_modes():
        return {
            process: torch.empty(1, count, dtype=entries[0][-1].dtype, device=entries[0][-1].device)
            for process, count in counts.items()
        }


def _counts(rooms: Mapping[int, Tensor]) -> dict[int, int]:
    return {process: room.shape[1] for process, room in rooms.items()}


def _held(rooms: Mapping[int, Tensor]) -> list[BoxedTensor]:
    return [BoxedTensor(room, MessageSizes.box(room.shape[1])) for room in rooms.values()]


def _places(
    entries: Sequence[_Entry], rooms: Mapping[int, Tensor]
) -> Iterator[tuple[_Entry, Tensor]]:
    """Where each piece lies in the messages."""
    start = dict.fromkeys(rooms, 0)
    for entry in entries:
        process, piece = entry[0], entry[-1]
        stop = start[process] + piece.numel()
        yield entry, rooms[process][0, start[process] : stop].view(piece.shape)
        start[process] = stop
