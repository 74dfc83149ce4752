"""A single message between two ranks, as an exchange with a route."""

from __future__ import annotations

from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.communicator import Communicator, UnderWay
from spatialdl.comm.plan import Plan
from spatialdl.layout.layout import Box, empty_box


def start_send(comm: Communicator, view: Tensor, rank: int, tag: int) -> UnderWay:
    """Send a view (N, *spatial) to a rank."""
    return comm.start_exchange(_exchange(view, (comm.rank, rank), tag, me=0))


def start_receive(comm: Communicator, view: Tensor, rank: int, tag: int) -> UnderWay:
    """Fill a view (N, *spatial) with what a rank sends."""
    return comm.start_exchange(_exchange(view, (rank, comm.rank), tag, me=1))


def _exchange(view: Tensor, ranks: tuple[int, int], tag: int, me: int) -> Exchange:
    box = Box((0, size) for size in view.shape)
    nothing = empty_box(view.dim() - 1)
    held = [BoxedTensor(view, box)]
    sends, receives = ([], held) if me else (held, [])
    plan = Plan((box, nothing), (nothing, box), me)
    return Exchange(plan, sends, receives, view.device, route=Route(ranks, tag))
