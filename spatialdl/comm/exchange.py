"""Exchanges along a plan: pieces of tensors are sent to its peers, on any transport."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.comm import allocator, check, dry, trace
from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Communicator, Pending, Start, UnderWay
from spatialdl.comm.plan import Piece, Plan
from spatialdl.comm.replay import exchange_once, is_active
from spatialdl.comm.single_process import Completed
from spatialdl.comm.waiting import noted
from spatialdl.errors import CommMismatch
from spatialdl.parallel.layout import Box

_holes = allocator.Holes()


def start_exchange(comm: Communicator, exchange: Exchange, name: str = "repartition") -> Pending:
    """Start to send the plan's pieces to its peers, and to receive theirs.

    Collective over `comm`, also for ranks without peers. Sent pieces must not be modified, nor
    received pieces read, before ``wait()`` of the result.

    Args:
        name: operation name, for the check.
    """
    is_meta = exchange.device.type == "meta"
    if not exchange.plan.communicates:
        return Completed()
    if is_meta:
        return dry.exchange(comm, exchange)
    if is_active():
        return exchange_once(lambda: _start(comm, exchange, name), exchange.landing())
    return _start(comm, exchange, name)


def _start(comm: Communicator, exchange: Exchange, name: str) -> Pending:
    if exchange.device.type == "cpu":
        _holes.poll()
    check.agree(comm, _Description(name, exchange.adjoint, exchange.plan))
    return _NotedExchange(comm, exchange, name)


class _Description(NamedTuple):
    """Description of an exchange, for the check."""

    name: str
    adjoint: bool
    plan: Plan

    def __str__(self) -> str:
        return f"{self.name} {'adjoint' if self.adjoint else 'forward'} {self.plan.describe()}"


class _NotedExchange:
    """An exchange whose wait is recorded for hang reports and traces."""

    kind: trace.Kind = "halo"

    def __init__(
        self, comm: Communicator, exchange: Exchange, name: str, start: Start | None = None
    ) -> None:
        self._comm, self._plan, self._name = comm, exchange.plan, name
        self._pending = check.run_checked(comm, start or comm.start_exchange, exchange)

    def wait(self) -> None:
        with trace.span(self.kind, self._name):
            self.wait_unrecorded()

    def wait_unrecorded(self) -> None:
        """Wait without a trace span, for callers that record several waits as one."""
        noted(self, self._peers, check.run_checked, self._comm, self._wait)

    def _wait(self) -> None:
        self._pending.wait()

    def _peers(self) -> list[int]:
        pieces = (*self._plan.sends, *self._plan.receives)
        return [self._comm.world_ranks[peer] for peer in sorted({piece.peer for piece in pieces})]

    def __str__(self) -> str:
        return f"exchange for {self._name} ({self._plan.describe()})"


# --- exchanges that ranks start at different times


class PlanMessages(_NotedExchange):
    """This rank's part of an exchange with a route.

    With the check on, a line of text precedes each piece.

    Args:
        name: name of the data, the same on both sides.
        start: starts the exchange, if not the communicator.
    """

    kind = "hand-over"

    def __init__(
        self, comm: Communicator, exchange: Exchange, name: str, start: Start | None = None
    ) -> None:
        self._lines: list[tuple[int, Tensor]] = []
        self._announced: UnderWay = Completed()
        if check.enabled() and exchange.route is not None:
            ranks = [comm.world_ranks[rank] for rank in exchange.route.ranks]
            text = check.encode(f"{name} {exchange.plan.describe()}")
            self._announced = self._announce(comm, exchange, text, ranks)
        super().__init__(comm, exchange, name, start)

    def _announce(
        self, comm: Communicator, exchange: Exchange, text: bytes, ranks: Sequence[int]
    ) -> UnderWay:
        self._text = check.as_tensor(text).view(1, -1)
        rooms = [BoxedTensor(torch.empty_like(self._text), _LINE) for _ in exchange.incoming]
        self._lines = [
            (ranks[piece.peer], room.tensor)
            for piece, room in zip(exchange.incoming, rooms, strict=True)
        ]
        plan, sends = _lines_of(exchange.plan), [BoxedTensor(self._text, _LINE)]
        lines = exchange._replace(plan=plan, sends=sends, receives=rooms, device=self._text.device)
        return comm.start_exchange(lines)

    def _wait(self) -> None:
        self._announced.wait()
        for rank, line in self._lines:
            if not torch.equal(line, self._text):
                mine, theirs = (check.decode(bytes(text.numpy())) for text in (self._text, line))
                own_rank = self._comm.world_ranks[self._comm.rank]
                raise CommMismatch(
                    f"ranks call different operations: rank {own_rank} expects '{mine}', rank "
                    f"{rank} sends '{theirs}'"
                )
        self._pending.wait()

    def is_done(self) -> bool:
        """Whether all messages are sent and received; does not block."""
        return self._announced.is_done() and self._pending.is_done()

    def _peers(self) -> list[int]:
        peers = self._announced.peers() or self._pending.peers()
        return [self._comm.world_ranks[rank] for rank in peers]


_LINE = Box(((0, 1), (0, check.TEXT_BYTES)))


@lru_cache(maxsize=4096)
def _lines_of(plan: Plan) -> Plan:
    """The same messages, with a line of text in place of each piece."""
    lines = copy(plan)
    lines.sends = tuple(Piece(piece.peer, _LINE) for piece in plan.sends)
    lines.receives = tuple(Piece(piece.peer, _LINE) for piece in plan.receives)
    return lines
