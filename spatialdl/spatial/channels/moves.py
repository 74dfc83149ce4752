"""Collectives between tensors with divided channels and replicated tensors; differentiable.

Every rank of the tensor axis computes the same loss. If all ranks compute the same from a
replicated tensor, its gradient is equal on all ranks. If each rank computes a part of the result,
gradients are partial and are summed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.comm.repartition import copy_kept, empty_for, move_back
from spatialdl.layout.layout import Bounds, Box
from spatialdl.layout.partition import Partition
from spatialdl.spatial.autocast import HALF, wide

NAME = "channels"


@lru_cache(maxsize=4096)
def _plan(before: int, bounds: Bounds, after: int, rank: int) -> Plan:
    """The plan from parts of the channels of (before, channels, after) to all on every rank."""
    owned = [Box(((0, before), interval, (0, after))) for interval in pairwise(bounds)]
    whole = Box(((0, before), (0, bounds[-1]), (0, after)))
    return Plan(owned, [whole] * len(owned), rank)


def _fold(x: Tensor, dim: int) -> Tensor:
    """``x`` as (before, channels, after), in logical order; a view if possible.

    The order is the same for channels-last tensors, because a rank with a single channel cannot
    detect this format.
    """
    return x.reshape(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))


def _empty_sized(x: Tensor, dim: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer with `size` channels in the memory format of `x`, to be used with `_fold`."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return empty_for(x, shape, dtype) if dim == 1 else x.new_empty(shape, dtype=dtype)


def local_part(whole: Tensor, dim: int, partition: Partition, rank: int) -> Tensor:
    """The part of a whole tensor that belongs to a rank; a view if it is one piece."""
    parts = [whole.narrow(dim, start, stop - start) for start, stop in partition.held(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def all_gather(part: Tensor, dim: int, partition: Partition, comm: Communicator) -> Tensor:
    """The whole tensor on every rank."""
    sizes = [bounds[comm.rank + 1] - bounds[comm.rank] for bounds in partition.pieces]
    wholes = []
    for bounds, piece in zip(partition.pieces, torch.split(part, sizes, dim), strict=True):
        own, whole = _fold(piece, dim), _empty_sized(piece, dim, bounds[-1])
        plan, out = _plan(own.shape[0], bounds, own.shape[2], comm.rank), _fold(whole, dim)
        held, window = [BoxedTensor(own, plan.own)], [BoxedTensor(out, plan.need)]
        exchange = start_exchange(comm, Exchange(plan, held, window, own.device, name=NAME))
        copy_kept(own, out, plan)
        exchange.wait()
        wholes.append(whole)
    return wholes[0] if len(wholes) == 1 else torch.cat(wholes, dim)


def reduce_scatter(whole: Tensor, dim: int, partition: Partition, comm: Communicator) -> Tensor:
    """This rank's part of the sum over ranks; half precision is sent as is, summed in float32."""
    parts, start = [], 0
    dtype = torch.float32 if whole.dtype in HALF else None
    for bounds in partition.pieces:
        piece = whole.narrow(dim, start, bounds[-1])
        folded = _fold(piece, dim)
        plan = _plan(folded.shape[0], bounds, folded.shape[2], comm.rank)
        total = move_back(comm, plan, folded, NAME, dtype)
        part = _empty_sized(piece, dim, total.shape[1], dtype)
        parts.append(part.copy_(total.view(part.shape)))
        start += bounds[-1]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, dim: int, partition: Partition, comm: Communicator, alike: bool
    ) -> Tensor:
        ctx.options = dim, partition, comm
        ctx.alike = alike
        return all_gather(part, dim, partition, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, partition, comm = ctx.options
        back = local_part(grad, dim, partition, comm.rank) if ctx.alike else None
        if back is None:
            back = reduce_scatter(grad, dim, partition, comm).to(grad.dtype)
        return back, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, dim: int, partition: Partition, comm: Communicator, summed: bool
    ) -> Tensor:
        ctx.options = dim, partition, comm
        ctx.dtype = whole.dtype
        if summed:
            return reduce_scatter(whole, dim, partition, comm)
        return local_part(whole, dim, partition, comm.rank).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, partition, comm = ctx.options
        whole = all_gather(grad.to(ctx.dtype), dim, partition, comm)
        return whole, None, None, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_over_ranks(ctx.comm, grad, f"{NAME} backward"), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Communicator) -> Tensor:
        ctx.dtype = part.dtype
        return sum_over_ranks(comm, wide(part), NAME)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def gather(part: Tensor, dim: int, partition: Partition, comm: Communicator, alike: bool) -> Tensor:
    """All channels on every rank; differentiable.

    Args:
        alike: whether all ranks compute the same from them; else gradients are partial and summed.
    """
    whole: Tensor = _Gather.apply(part, dim, partition, comm, alike)  # type: ignore[no-untyped-call]
    return whole


def take_channels(whole: Tensor, dim: int, partition: Partition, comm: Communicator) -> Tensor:
    """This rank's channels of a replicated tensor; differentiable."""
    part: Tensor = _Scatter.apply(whole, dim, partition, comm, False)  # type: ignore[no-untyped-call]
    return part


def sum_and_divide(part: Tensor, dim: int, partition: Partition, comm: Communicator) -> Tensor:
    """This rank's channels of the sum over ranks; float32 for half precision; differentiable."""
    own: Tensor = _Scatter.apply(part, dim, partition, comm, True)  # type: ignore[no-untyped-call]
    return own


def replicate(whole: Tensor, comm: Communicator) -> Tensor:
    """A replicated tensor from which each rank computes a part; backward sums the gradients."""
    same: Tensor = _Replicate.apply(whole, comm) if whole.requires_grad else whole  # type: ignore[no-untyped-call]
    return same


def sum_parts(part: Tensor, comm: Communicator) -> Tensor:
    """The sum over ranks, on every rank; float32 for half precision; differentiable."""
    total: Tensor = _Reduce.apply(part, comm)  # type: ignore[no-untyped-call]
    return total
