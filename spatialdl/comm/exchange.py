"""Messages along a plan: pieces of tensors go to its peers, on whichever transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from spatialdl.comm import check, dry, trace
from spatialdl.comm.alone import Done
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.held import Held, pieces_of, views_of
from spatialdl.comm.plan import Plan
from spatialdl.comm.tape import exchange_once, taped
from spatialdl.comm.waiting import noted


def start_exchange(
    comm: Communicator,
    plan: Plan,
    sends: Sequence[Held],
    receives: Sequence[Held],
    *,
    device: torch.device,
    adjoint: bool = False,
    name: str = "repartition",
) -> Pending:
    """Start to send the plan's pieces to its peers, and to receive theirs.

    Every rank of `comm` must call it, with neighbours or without. Pieces must not be written into,
    nor those received read, before ``wait()`` of what is returned.

    Args:
        sends: tensors that hold ``plan.sends`` (``plan.receives`` if `adjoint`); of several that
            hold a piece the first counts.
        receives: tensors that hold ``plan.receives`` (``plan.sends`` if `adjoint`).
        device: where the tensors lie; on ``meta`` nothing is moved.
        adjoint: the plan backwards.
        name: of the operation, for the check.
    """
    if plan.talks and device.type == "meta":
        _note(plan, sends, adjoint)
    if not plan.talks or device.type == "meta":
        return Done()
    if taped():
        views = views_of(pieces_of(plan, adjoint)[1], receives)
        return exchange_once(
            lambda: _start(comm, plan, sends, receives, device, adjoint, name), views
        )
    return _start(comm, plan, sends, receives, device, adjoint, name)


def _note(plan: Plan, sends: Sequence[Held], adjoint: bool) -> None:
    """What this rank would send, to how many, for those who listen on a dry run."""
    outgoing, incoming = pieces_of(plan, adjoint)
    size = sum(view.nbytes for view in views_of(outgoing, sends))
    dry.note("exchange", len({piece.peer for piece in (*outgoing, *incoming)}), size)


def _start(
    comm: Communicator,
    plan: Plan,
    sends: Sequence[Held],
    receives: Sequence[Held],
    device: torch.device,
    adjoint: bool,
    name: str,
) -> Pending:
    check.agree(comm, _Described(name, adjoint, plan))
    start = comm.start_exchange
    pending = check.understood(comm, start, plan, sends, receives, adjoint, device)
    return _Noted(pending, comm, plan, name)


class _Described(NamedTuple):
    """An exchange, for the check."""

    name: str
    adjoint: bool
    plan: Plan

    def __str__(self) -> str:
        return f"{self.name} {'adjoint' if self.adjoint else 'forward'} {self.plan.describe()}"


class _Noted:
    """An exchange whose wait is noted, and recorded or counted."""

    def __init__(self, pending: Pending, comm: Communicator, plan: Plan, name: str) -> None:
        self._pending, self._comm, self._plan, self._name = pending, comm, plan, name

    def wait(self) -> None:
        with trace.span("halo", self._name):
            noted(self, self._peers, check.understood, self._comm, self._pending.wait)

    def _peers(self) -> list[int]:
        pieces = (*self._plan.sends, *self._plan.receives)
        return [self._comm.world_ranks[peer] for peer in sorted({piece.peer for piece in pieces})]

    def __str__(self) -> str:
        return f"exchange for {self._name} ({self._plan.describe()})"
