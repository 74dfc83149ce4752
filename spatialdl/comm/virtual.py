"""Virtual ranks: a communicator whose ranks are threads of one process that take turns."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.communicator import fold
from spatialdl.comm.held import Exchange
from spatialdl.comm.turns import Turns


class _Call:
    """What ranks bring to one collective call, and what comes of it."""

    def __init__(self, size: int) -> None:
        self.given: dict[int, Any] = {}
        self.left = size
        self.outcome: Any = None

    def settle(self, make: Callable[[list[Any]], Any]) -> Any:
        """What `make` makes of all that was brought, made once, by the first that asks."""
        if self.outcome is None:
            self.outcome = (make([self.given[rank] for rank in range(len(self.given))]),)
        return self.outcome[0]


class _Room:
    """What the virtual ranks of a communicator share.

    Args:
        turns: of all virtual ranks.
        ranks: what those of the communicator are called in the world.
    """

    def __init__(self, turns: Turns[Any], ranks: Sequence[int]) -> None:
        self.turns, self.ranks = turns, tuple(ranks)
        self.calls: dict[int, _Call] = {}
        self.rooms: dict[tuple[object, ...], _Room] = {}

    def bring(self, number: int, rank: int, what: object) -> _Call:
        """Add what a rank brings to call `number`."""
        call = self.calls.setdefault(number, _Call(len(self.ranks)))
        call.given[rank] = what
        return call

    def leave(self, number: int) -> None:
        """A rank has taken from call `number` what it needs."""
        self.calls[number].left -= 1
        if not self.calls[number].left:
            del self.calls[number]

    def within(self, key: tuple[object, ...], ranks: Sequence[int]) -> _Room:
        """A room of some of these ranks, the same for all who give the same key."""
        return self.rooms.setdefault(key, _Room(self.turns, [self.ranks[rank] for rank in ranks]))


class Virtual:
    """A `Communicator`, as virtual rank `rank` sees it; made by `virtual_ranks`.

    All of its ranks call the same in the same order, each in its thread.
    """

    overlaps = False

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self.rank = room, rank
        self._calls = 0

    @property
    def size(self) -> int:
        return len(self._room.ranks)

    @property
    def world_ranks(self) -> Sequence[int]:
        return self._room.ranks

    def subset(self, ranks: Sequence[int]) -> Virtual:
        self._calls += 1
        room = self._room.within((self._calls, tuple(ranks)), ranks)
        return Virtual(room, list(ranks).index(self.rank))

    def duplicate(self) -> Virtual:
        return self.subset(range(self.size))

    def nodes(self) -> list[int]:
        return [0] * self.size

    def barrier(self) -> None:
        self._settled(None, lambda _: None)

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        sent = pickle.dumps(obj) if self.rank == root else None
        return pickle.loads(self._settled(sent, operator.itemgetter(root)))

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        found = self.allgather(obj)
        return found if self.rank == root else None

    def allgather(self, obj: Any, /) -> list[Any]:
        return [pickle.loads(one) for one in self._settled(pickle.dumps(obj), list)]

    def allreduce(self, obj: Any, /, op: Any = operator.add) -> Any:
        return fold(self.allgather(obj), op)

    def all_reduce(self, values: Tensor) -> Tensor:
        total: Tensor = self._settled(values, _sum)
        return total.clone()

    def all_reduce_(self, values: Tensor) -> None:
        self.start_all_reduce(values).wait()

    def start_all_reduce(self, values: Tensor) -> _Summing:
        return _Summing(self, values)

    def all_gather(self, values: Tensor) -> Tensor:
        together: Tensor = self._settled(values, torch.stack)
        return together.clone()

    def start_exchange(self, exchange: Exchange) -> _Moving:
        if exchange.route is not None:
            raise NotImplementedError("virtual ranks come to an exchange together")
        return _Moving(self, exchange)

    # --- for what is under way

    def bring(self, what: object) -> tuple[int, _Call]:
        """Begin the next call, with what this rank brings."""
        self._calls += 1
        return self._calls, self._room.bring(self._calls, self.rank, what)

    def wait_for(self, call: _Call, ranks: Sequence[int] | None = None) -> None:
        """Until these ranks, or all, have brought something to a call."""
        needed = range(self.size) if ranks is None else ranks
        self._room.turns.wait(lambda: all(rank in call.given for rank in needed))

    def leave(self, number: int) -> None:
        """Take nothing more from a call."""
        self._room.leave(number)

    def _settled(self, what: object, make: Callable[[list[Any]], Any]) -> Any:
        number, call = self.bring(what)
        self.wait_for(call)
        found = call.settle(make)
        self.leave(number)
        return found


class _Summing:
    """A sum under way."""

    def __init__(self, comm: Virtual, values: Tensor) -> None:
        self._comm, self._values = comm, values
        self._number, self._call = comm.bring(values)

    def wait(self) -> None:
        self._comm.wait_for(self._call)
        self._values.copy_(self._call.settle(_sum))
        self._comm.leave(self._number)


class _Moving:
    """An exchange under way: copies of what is sent lie ready for those who receive it."""

    def __init__(self, comm: Virtual, exchange: Exchange) -> None:
        self._comm, self._exchange = comm, exchange
        sent: dict[int, list[Tensor]] = {}
        for piece, view in zip(exchange.outgoing, exchange.leaving(), strict=True):
            sent.setdefault(piece.peer, []).append(view.detach().clone())
        self._number, self._call = comm.bring(sent)
        self._is_over = False

    def peers(self) -> list[int]:
        return sorted({piece.peer for piece in self._exchange.incoming})

    def is_done(self) -> bool:
        return all(peer in self._call.given for peer in self.peers())

    def wait(self) -> None:
        if self._is_over:
            return
        self._comm.wait_for(self._call, self.peers())
        pieces = zip(self._exchange.incoming, self._exchange.landing(), strict=True)
        for piece, view in pieces:
            view.copy_(self._call.given[piece.peer][self._comm.rank].pop(0))
        self._comm.leave(self._number)
        self._is_over = True


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for one in values[1:]:
        total += one
    return total


def virtual_ranks(count: int, turns: Turns[Any]) -> list[Virtual]:
    """The communicators of `count` virtual ranks, which run as threads of `turns`."""
    room = _Room(turns, range(count))
    return [Virtual(room, rank) for rank in range(count)]
