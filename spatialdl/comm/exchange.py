"""Exchanges along a plan: pieces of tensors are sent to its peers, on any transport."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.comm import allocator, check, dry, trace
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Communicator, Pending, Start
from spatialdl.comm.plan import Plan
from spatialdl.comm.replay import exchange_once, is_active
from spatialdl.comm.single_process import Completed
from spatialdl.comm.waiting import noted

_holes = allocator.Holes()


def start_exchange(comm: Communicator, exchange: Exchange, name: str = "repartition") -> Pending:
    """Start to send the plan's pieces to its peers, and to receive theirs.

    Collective over `comm`, also for ranks without peers. Sent pieces must not be modified, nor
    received pieces read, before ``wait()`` of the result.

    Args:
        name: operation name, for the check.
    """
    if not exchange.plan.communicates:
        return Completed()
    if exchange.device.type == "meta":
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
        noted(self, self._peers, check.run_checked, self._comm, self._pending.wait)

    def _peers(self) -> list[int]:
        pieces = (*self._plan.sends, *self._plan.receives)
        return [self._comm.world_ranks[peer] for peer in sorted({piece.peer for piece in pieces})]

    def __str__(self) -> str:
        return f"exchange for {self._name} ({self._plan.describe()})"


# --- exchanges that ranks start at different times


class PlanMessages(_NotedExchange):
    """This rank's part of an exchange with a route.

    Args:
        name: name of the data, the same on both sides.
        start: starts the exchange, if not the communicator.
    """

    kind = "hand-over"

    def is_done(self) -> bool:
        """Whether all messages are sent and received; does not block."""
        return self._pending.is_done()

    def _peers(self) -> list[int]:
        return [self._comm.world_ranks[rank] for rank in self._pending.peers()]
