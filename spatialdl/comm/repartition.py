"""Repartition, the primitive that moves activations between ranks, and its adjoint.

A tensor moves from the boxes that ranks own to the boxes that ranks need. Backward is the adjoint:
the reversed plan, with overlapping parts summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.layout.layout import Box

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def view_of(tensor: Tensor, held: Box, box: Box) -> Tensor:
    """Part `box` of a tensor (N, ..., *spatial) that holds the box `held`."""
    return BoxedTensor(tensor, held).view(box)


def shape_of(like: Tensor, box: Box) -> tuple[int, ...]:
    """Shape of a tensor such as `like` over `box`."""
    batch, *spatial = box.shape
    return (batch, *like.shape[1 : -len(spatial)], *spatial)


def empty_for(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Empty tensor of `shape`, channels-last if `like` is; `dtype` defaults to that of `like`."""
    is_last = like.dim() > 3 and like.shape[1] > 1 and like.stride(1) == 1
    memory_format = torch.contiguous_format
    if is_last and not like.is_contiguous():
        memory_format = _CHANNELS_LAST.get(like.dim(), memory_format)
    dtype = dtype or like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)


def room_for_window(tile: Tensor, plan: Plan, fill: float = 0.0) -> Tensor:
    """Memory for the box that this rank needs; pixels without an owner are set to `fill`."""
    out = empty_for(tile, shape_of(tile, plan.need))
    for box in plan.unowned:
        view_of(out, plan.need, box).fill_(fill)
    return out


def copy_kept(tile: Tensor, out: Tensor, plan: Plan) -> None:
    """Copy the needed part of this rank's own tile."""
    if not plan.kept.is_empty:
        view_of(out, plan.need, plan.kept).copy_(view_of(tile, plan.own, plan.kept))


def rooms_back(like: Tensor, plan: Plan) -> list[BoxedTensor]:
    """Receive buffers for the adjoint, one for each piece, as pieces may overlap."""
    return [
        BoxedTensor(like.new_empty(shape_of(like, piece.box)), piece.box) for piece in plan.sends
    ]


def add_up(out: Tensor, plan: Plan, arrivals: Sequence[BoxedTensor]) -> None:
    """Add the received pieces to this rank's own box."""
    for arrival, box in arrivals:
        view_of(out, plan.own, box).add_(arrival)


def move(
    comm: Communicator, plan: Plan, tile: Tensor, fill: float = 0.0, name: str = "repartition"
) -> Tensor:
    """Box that this rank needs, from the tile (N, ..., *spatial) that it owns.

    Pixels without an owner (outside the image) are set to `fill`.
    """
    out = room_for_window(tile, plan, fill)
    window, own = [BoxedTensor(out, plan.need)], [BoxedTensor(tile, plan.own)]
    exchange = start_exchange(comm, Exchange(plan, own, window, tile.device, name=name))
    copy_kept(tile, out, plan)
    exchange.wait()
    return out


def move_back(
    comm: Communicator,
    plan: Plan,
    grad: Tensor,
    name: str = "repartition",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Adjoint of `move`: the sum of all ranks' values over this rank's own box.

    Args:
        dtype: dtype of the sum; by default that of `grad`, which messages have.
    """
    out = empty_for(grad, shape_of(grad, plan.own), dtype)
    for box in plan.unneeded:
        view_of(out, plan.own, box).zero_()
    arrivals = rooms_back(grad, plan)
    window = [BoxedTensor(grad, plan.need)]
    moved = Exchange(plan, window, arrivals, grad.device, adjoint=True, name=name)
    exchange = start_exchange(comm, moved)
    if not plan.kept.is_empty:
        view_of(out, plan.own, plan.kept).copy_(view_of(grad, plan.need, plan.kept))
    exchange.wait()
    add_up(out, plan, arrivals)
    return out


class _Repartition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, comm: Communicator, plan: Plan, fill: float, name: str
    ) -> Tensor:
        ctx.comm, ctx.plan, ctx.name = comm, plan, name
        return move(comm, plan, tile, fill, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return move_back(ctx.comm, ctx.plan, grad, ctx.name), None, None, None, None


def repartition(
    tile: Tensor, comm: Communicator, plan: Plan, fill: float = 0.0, name: str = "repartition"
) -> Tensor:
    """Move a tile to the box that this rank needs; differentiable.

    Args:
        tile: (N, ..., *spatial), this rank's own box ``plan.own``.
        comm: ranks of the plan; collective.
        plan: boxes owned and needed.
        fill: value of pixels outside the image.
        name: operation name, for error messages.

    Returns:
        (n, ..., *spatial): the box ``plan.need``.
    """
    moved: Tensor = _Repartition.apply(tile, comm, plan, fill, name)  # type: ignore[no-untyped-call]
    return moved
