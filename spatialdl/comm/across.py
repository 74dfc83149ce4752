"""Combines the contributions of virtual ranks of several processes to one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.plan import MessageSizes
from spatialdl.comm.waiting import noted
from spatialdl.torch_internals import disable_current_modes


class Sent(NamedTuple):
    """Contribution of a virtual rank to an exchange.

    Attributes:
        pieces: in order, by receiving rank.
    """

    rank: int
    exchange: Exchange
    pieces: dict[int, list[Tensor]]


class GivenUp(Exception):
    """A step was aborted by a stop request; weights and buffers are as before the step."""


class Across:
    """Link between the virtual ranks of several processes; collective.

    Args:
        comm: the processes.
        ranks: virtual ranks of each process, the same number for each.

    Attributes:
        stops: whether this process was requested to stop. If one was, a later call raises
            `GivenUp`, the same call in all processes. None if other processes depend on this step.
    """

    stops: Callable[[], bool] | None = None

    def __init__(self, comm: Communicator, ranks: Sequence[Sequence[int]]) -> None:
        self._comm = comm.duplicate()
        self._under_way: list[Crossing] = []
        self._stop_request: tuple[Tensor, Pending] | None = None
        self.here = tuple(ranks[comm.rank])
        self._process = {rank: process for process, some in enumerate(ranks) for rank in some}
        # positions in gathered values, in the order of virtual ranks
        gathered = [rank for some in ranks for rank in some]
        self._order = [gathered.index(rank) for rank in range(len(gathered))]

    def is_here(self, rank: int) -> bool:
        return rank in self.here

    def objects(self, own: list[bytes]) -> list[bytes]:
        """Objects of all virtual ranks, given those of this process."""
        self._check_stop()
        gathered = [one for some in self._comm.allgather(own) for one in some]
        return [gathered[place] for place in self._order]

    def sum(self, own: Tensor) -> Tensor:
        self._check_stop()
        return self._comm.all_reduce(own)

    def stack(self, own: list[Tensor]) -> Tensor:
        """(virtual ranks, ...), given the tensors of this process."""
        self._check_stop()
        return self._comm.all_gather(torch.stack(own)).flatten(0, 1)[self._order]

    def exchange(self, sent: list[Sent]) -> Crossing:
        """Start the messages between processes; each pair uses one order in both directions."""
        self._check_stop()
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
        # no rank waits for messages of a process that only sends, so they are kept until complete
        self._under_way = [one for one in self._under_way if not one.is_done()]
        crossing = Crossing(self._comm, leaving, arriving, sent[0].exchange.device)
        self._under_way.append(crossing)
        return crossing

    def finish(self) -> None:
        """Wait until all messages are sent; called when virtual ranks of this process are done."""
        for one in self._under_way:
            one.wait()
        self._under_way = []
        if self._stop_request is not None:
            self._stop_request[1].wait()
            self._stop_request = None

    def _check_stop(self) -> None:
        """Complete the previous all-reduce of stop requests, and start the next one.

        Raises:
            GivenUp: a process was requested to stop.
        """
        if self.stops is None:
            return
        if self._stop_request is not None:
            (flag, pending), self._stop_request = self._stop_request, None
            noted("agreeing to stop", self._comm.world_ranks, pending.wait)
            if flag[0] > 0:
                raise GivenUp
        with disable_current_modes():
            flag = torch.tensor([float(self.stops())])
            self._stop_request = flag, self._comm.start_all_reduce(flag)


_Entry = tuple[int, int, int, Tensor]
"""Peer process, sending rank, receiving rank, piece."""


class Crossing:
    """Pending pieces to and from other processes, one message for each process."""

    def __init__(
        self,
        comm: Communicator,
        leaving: Sequence[_Entry],
        arriving: Sequence[_Entry],
        device: torch.device,
    ) -> None:
        self._comm, self._arriving = comm, arriving
        sends, self._receives = _buffers(leaving), _buffers(arriving)
        for entry, place in _places(leaving, sends):
            place.copy_(entry[-1])
        plan = MessageSizes(_counts(sends), _counts(self._receives))
        route = Route(range(comm.size), 0)
        exchange = Exchange(plan, _boxed(sends), _boxed(self._receives), device, route=route)
        self._pending = comm.start_exchange(exchange)
        self._received: dict[int, dict[int, list[Tensor]]] | None = None

    def is_done(self) -> bool:
        return self._received is not None or self._pending.is_done()

    def wait(self) -> None:
        """Wait until all sends and receives are complete."""
        noted("exchange of virtual ranks", self._comm.world_ranks, self._pending.wait)

    def arrived(self, rank: int) -> dict[int, list[Tensor]]:
        """Pieces received by a virtual rank, by sender; waits for all messages of this process."""
        if self._received is None:
            self.wait()
            self._received = {}
            for (_, sender, receiver, _view), place in _places(self._arriving, self._receives):
                self._received.setdefault(receiver, {}).setdefault(sender, []).append(place)
            self._arriving, self._receives = (), {}
        return self._received.pop(rank, {})


def _buffers(entries: Sequence[_Entry]) -> dict[int, Tensor]:
    """Message buffer (1, elements) of each process.

    Modes are disabled: the transport knows the address, so no mode may move the memory.
    """
    counts: dict[int, int] = {}
    for process, _, _, piece in entries:
        counts[process] = counts.get(process, 0) + piece.numel()
    with disable_current_modes():
        return {
            process: torch.empty(1, count, dtype=entries[0][-1].dtype, device=entries[0][-1].device)
            for process, count in counts.items()
        }


def _counts(buffers: Mapping[int, Tensor]) -> dict[int, int]:
    return {process: buffer.shape[1] for process, buffer in buffers.items()}


def _boxed(buffers: Mapping[int, Tensor]) -> list[BoxedTensor]:
    return [BoxedTensor(buffer, MessageSizes.box(buffer.shape[1])) for buffer in buffers.values()]


def _places(
    entries: Sequence[_Entry], buffers: Mapping[int, Tensor]
) -> Iterator[tuple[_Entry, Tensor]]:
    """View of each piece in the message buffers."""
    start = dict.fromkeys(buffers, 0)
    for entry in entries:
        process, piece = entry[0], entry[-1]
        stop = start[process] + piece.numel()
        yield entry, buffers[process][0, start[process] : stop].view(piece.shape)
        start[process] = stop
