"""Messages along a plan: tensor views go to the plan's peers, on whichever transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.alone import Done
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.plan import Plan
from spatialdl.comm.tape import exchange_once


def start_exchange(
    comm: Communicator,
    plan: Plan,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    *,
    device: torch.device,
    adjoint: bool = False,
    name: str = "repartition",
) -> Pending:
    """Start to move `sends` to, and fill `receives` from, the plan's peers.

    Every rank of `comm` must call it, with neighbours or without. Views must not be used before
    ``wait()`` of what is returned.

    Args:
        sends: a view per ``plan.sends`` (per ``plan.receives`` if `adjoint`).
        receives: a view per ``plan.receives`` (per ``plan.sends`` if `adjoint`).
        device: where the views lie; on ``meta`` nothing is moved.
        adjoint: the plan backwards.
        name: of the operation, for the check.
    """
    if not plan.talks or device.type == "meta":
        return Done()

    def start() -> Pending:
        if check.enabled():
            check.agree(comm, f"{name} {'adjoint' if adjoint else 'forward'} {plan.describe()}")
        return comm.start_exchange(plan, sends, receives, adjoint, device)

    return exchange_once(start, receives)
