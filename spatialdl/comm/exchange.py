"""The transport: tensor views go to neighbours, straight from and into where they lie.

One neighbourhood collective moves all messages of a plan. On devices that MPI cannot read, the
views pass through buffers on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.datatypes import mpi_type
from spatialdl.comm.plan import Plan

if TYPE_CHECKING:
    from mpi4py import MPI


class Exchange:
    """An exchange under way; `wait` returns when all views received are filled."""

    def __init__(
        self, request: MPI.Request | None, keep: object, arrivals: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._request = request
        self._keep = keep  # buffers must outlive the messages
        self._arrivals = arrivals

    def wait(self) -> None:
        if self._request is not None:
            self._request.Wait()
        for view, landed in self._arrivals:
            view.copy_(landed)
        self._request, self._keep, self._arrivals = None, None, ()


def start_exchange(
    comm: MPI.Intracomm,
    plan: Plan,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    *,
    device: torch.device,
    adjoint: bool = False,
    name: str = "repartition",
) -> Exchange:
    """Start to move `sends` to, and fill `receives` from, the plan's peers.

    Every rank of `comm` must call it, with neighbours or without.

    Args:
        sends: a view per ``plan.sends`` (per ``plan.receives`` if `adjoint`).
        receives: a view per ``plan.receives`` (per ``plan.sends`` if `adjoint`).
        device: where the views lie; on ``meta`` nothing is moved.
        adjoint: the plan backwards.
        name: of the operation, for the check.
    """
    if not plan.talks or device.type == "meta":
        return Exchange(None, None, ())
    check.agree(comm, f"{name} {'adjoint' if adjoint else 'forward'} {plan.describe()}")
    on_host = device.type == "cpu"
    outgoing = sends if on_host else [view.cpu() for view in sends]
    incoming = (
        receives if on_host else [view.new_empty(view.shape, device="cpu") for view in receives]
    )
    request = _graph_comm(comm, plan, adjoint).Ineighbor_alltoallw(
        _message(outgoing), _message(incoming)
    )
    arrivals = () if on_host else tuple(zip(receives, incoming, strict=True))
    return Exchange(request, (outgoing, incoming), arrivals)


def _message(views: Sequence[Tensor]) -> list[object]:
    from mpi4py import MPI

    return [
        MPI.BOTTOM,
        [1] * len(views),
        [view.data_ptr() for view in views],
        [mpi_type(view) for view in views],
    ]


@cache
def _graphs_key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def _graph_comm(comm: MPI.Intracomm, plan: Plan, adjoint: bool) -> MPI.Distgraphcomm:
    """The communicator in which a rank's neighbours are the plan's peers.

    One per set of neighbours, kept as an attribute of `comm`, because MPI libraries have few
    contexts to give away. Whether one must be made follows from the whole plan, so all ranks make
    it together.
    """
    kept = comm.Get_attr(_graphs_key())
    graphs: dict[tuple[bytes, bool], MPI.Distgraphcomm] = kept if isinstance(kept, dict) else {}
    if kept is None:
        comm.Set_attr(_graphs_key(), graphs)
    key = (plan.graph, adjoint)
    if key not in graphs:
        sources = [piece.peer for piece in plan.receives]
        targets = [piece.peer for piece in plan.sends]
        if adjoint:
            sources, targets = targets, sources
        graphs[key] = comm.Create_dist_graph_adjacent(sources, targets)
    return graphs[key]
