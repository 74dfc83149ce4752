"""Virtual ranks: a communicator of threads that take turns, in one or more processes."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.across import Across, Sent
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import fold
from spatialdl.comm.turns import Turns
from spatialdl.errors import CommMismatch


class _Call:
    """Contributions of ranks to one collective call, and its result."""

    def __init__(self, local_ranks: int) -> None:
        self.inputs: dict[int, Any] = {}
        self.pending = local_ranks
        self.outcome: Any = None

    @property
    def is_settled(self) -> bool:
        return self.outcome is not None


class _Room:
    """State shared by the virtual ranks of a communicator in one process.

    Args:
        turns: scheduler of all virtual ranks of the process.
        here: ranks of the communicator in this process.
        world_ranks: world ranks of all ranks of the communicator.
        across: link to the other processes, if there are any.
    """

    def __init__(
        self,
        turns: Turns[Any],
        here: Sequence[int],
        world_ranks: Sequence[int],
        across: Across | None = None,
    ) -> None:
        self.turns, self.here, self.world_ranks = turns, tuple(here), tuple(world_ranks)
        self.across = across
        self.calls: dict[int, _Call] = {}

    def bring(self, number: int, rank: int, what: object, settle: Settle | None) -> _Call:
        """Add the contribution of a rank to call `number`.

        The last one settles the call, so that all processes settle their calls in the same order.
        """
        call = self.calls.setdefault(number, _Call(len(self.here)))
        if type(next(iter(call.inputs.values()), what)) is not type(what):
            raise CommMismatch(
                f"one of {len(self.here)} virtual ranks calls another operation than those before "
                "it: the network must execute the same operations on every virtual rank"
            )
        call.inputs[rank] = what
        if settle is not None and len(call.inputs) == len(self.here):
            call.outcome = (settle([call.inputs[one] for one in self.here]),)
        return call

    def release(self, number: int) -> None:
        """Drop a rank's reference to call `number`."""
        self.calls[number].pending -= 1
        if not self.calls[number].pending:
            del self.calls[number]


Settle = Callable[[list[Any]], Any]
"""Computes the result of a call from the contributions of this process's ranks, in rank order."""


class Virtual:
    """A `Communicator` from the view of virtual rank `rank`; made by `virtual_ranks`.

    All of its ranks make the same calls in the same order, each in its thread.
    """

    overlaps = False

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self.rank = room, rank
        self._calls = 0

    @property
    def size(self) -> int:
        return len(self._room.world_ranks)

    @property
    def world_ranks(self) -> Sequence[int]:
        return self._room.world_ranks

    def subset(self, ranks: Sequence[int]) -> Virtual:
        raise NotImplementedError("virtual ranks cannot form subsets")

    def duplicate(self) -> Virtual:
        return self

    def nodes(self) -> list[int]:
        return [0] * self.size

    def barrier(self) -> None:
        self.allgather(None)

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        gathered = self.allgather(obj)
        return gathered if self.rank == root else None

    def allgather(self, obj: Any, /) -> list[Any]:
        across = self._room.across
        settle: Settle = list if across is None else across.objects
        return [pickle.loads(one) for one in self._settled(pickle.dumps(obj), settle)]

    def allreduce(self, obj: Any, /, op: Any = operator.add) -> Any:
        return fold(self.allgather(obj), op)

    def all_reduce(self, values: Tensor) -> Tensor:
        total: Tensor = self._settled(values, self.sum)
        return total.clone()

    def all_reduce_(self, values: Tensor) -> None:
        self.start_all_reduce(values).wait()

    def start_all_reduce(self, values: Tensor) -> _Summing:
        return _Summing(self, values)

    def all_gather(self, values: Tensor) -> Tensor:
        across = self._room.across
        settle: Settle = torch.stack if across is None else across.stack
        stacked: Tensor = self._settled(values, settle)
        return stacked.clone()

    def start_exchange(self, exchange: Exchange) -> _Moving:
        if exchange.route is not None:
            raise NotImplementedError("virtual ranks support collective exchanges only")
        return _Moving(self, exchange)

    # --- for pending operations

    @property
    def across(self) -> Across | None:
        return self._room.across

    def sum(self, values: Sequence[Tensor]) -> Tensor:
        """Sum over all ranks, given the tensors of this process's ranks."""
        total = values[0].clone()
        for one in values[1:]:
            total += one
        return total if self._room.across is None else self._room.across.sum(total)

    def bring(self, what: object, settle: Settle | None = None) -> tuple[int, _Call]:
        """Begin the next call with the contribution of this rank."""
        self._calls += 1
        return self._calls, self._room.bring(self._calls, self.rank, what, settle)

    def wait_for(self, call: _Call, ranks: Sequence[int]) -> None:
        """Wait until these ranks of this process have contributed to a call."""
        self._room.turns.wait(lambda: all(rank in call.inputs for rank in ranks))

    def wait_until_settled(self, call: _Call) -> None:
        self._room.turns.wait(lambda: call.is_settled)

    def release(self, number: int) -> None:
        """Drop the reference to a finished call."""
        self._room.release(number)

    def _settled(self, what: object, settle: Settle) -> Any:
        number, call = self.bring(what, settle)
        self.wait_until_settled(call)
        self.release(number)
        return call.outcome[0]


class _Summing:
    """A pending sum."""

    def __init__(self, comm: Virtual, values: Tensor) -> None:
        self._comm, self._values = comm, values
        self._number, self._call = comm.bring(values, comm.sum)

    def wait(self) -> None:
        self._comm.wait_until_settled(self._call)
        self._values.copy_(self._call.outcome[0])
        self._comm.release(self._number)


class _Moving:
    """A pending exchange: holds copies of sent pieces until peers receive them."""

    def __init__(self, comm: Virtual, exchange: Exchange) -> None:
        self._comm, self._exchange = comm, exchange
        sent: dict[int, list[Tensor]] = {}
        for piece, view in zip(exchange.outgoing, exchange.leaving(), strict=True):
            sent.setdefault(piece.peer, []).append(view.detach().clone())
        across = comm.across
        self._number, self._call = comm.bring(
            Sent(comm.rank, exchange, sent), None if across is None else across.exchange
        )
        peers = dict.fromkeys(piece.peer for piece in exchange.incoming)
        self._near = [peer for peer in peers if across is None or across.is_here(peer)]
        self._far = [peer for peer in peers if peer not in self._near]
        self._is_over = False

    def peers(self) -> list[int]:
        return sorted([*self._near, *self._far])

    def is_done(self) -> bool:
        if self._far and not (self._call.is_settled and self._call.outcome[0].is_done()):
            return False
        return all(peer in self._call.inputs for peer in self._near)

    def wait(self) -> None:
        if self._is_over:
            return
        self._comm.wait_for(self._call, self._near)
        arrived = {peer: self._call.inputs[peer].pieces[self._comm.rank] for peer in self._near}
        if self._far:
            self._comm.wait_until_settled(self._call)
            arrived |= self._call.outcome[0].arrived(self._comm.rank)
        pieces = zip(self._exchange.incoming, self._exchange.landing(), strict=True)
        for piece, view in pieces:
            view.copy_(arrived[piece.peer].pop(0))
        self._comm.release(self._number)
        self._is_over = True


def virtual_ranks(count: int, turns: Turns[Any], across: Across | None = None) -> list[Virtual]:
    """Communicators of the virtual ranks of this process, which run as threads of `turns`.

    Args:
        count: number of virtual ranks of all processes.
        across: link to the other processes; collective. None for a single process.
    """
    here = range(count) if across is None else across.here
    room = _Room(turns, here, range(count), across)
    return [Virtual(room, rank) for rank in here]
