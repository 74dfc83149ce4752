"""Maxima and minima, and their indices.

As in PyTorch, ``amax``, ``amin`` and ``max`` and ``min`` without a dim distribute the gradient
evenly among equal values of the whole image; ``max`` and ``min`` with a dim give it to the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.spatial.span import (
    ReductionSpan,
    check_call,
    dims_of,
    positions_on,
    reduction,
    span_of,
    split_dims,
    without_dims,
)
from spatialdl.spatial.tensor import SpatialTensor, register_op, to_tile

Function = Callable[..., Any]


def _least(dtype: torch.dtype, sign: int) -> float:
    """The identity of the maximum (sign 1) or minimum (-1) for a dtype."""
    if dtype.is_floating_point:
        return -sign * math.inf
    if dtype == torch.bool:
        return float(sign < 0)
    return torch.iinfo(dtype).min if sign > 0 else torch.iinfo(dtype).max


def _of_all_ranks(part: Tensor, span: ReductionSpan, sign: int) -> Tensor:
    """The maximum (sign 1) or minimum (-1) of the ranks' parts, in the full size."""
    whole = span.place(part, _least(part.dtype, sign))
    gathered = gather_over_ranks(span.comm, whole, "amax" if sign > 0 else "amin")
    return gathered.amax(0) if sign > 0 else gathered.amin(0)


def extreme_of_tile(tile: Tensor, span: ReductionSpan, sign: int) -> Tensor:
    """The maximum (sign 1) or minimum (-1) of this tile; the lowest or highest number if empty."""
    if tile.numel() == 0:
        shape = [1 if d in span.dims else n for d, n in enumerate(tile.shape)]
        return tile.new_full(shape, _least(tile.dtype, sign))
    reduce = torch.amax if sign > 0 else torch.amin
    return reduce(tile, span.dims, keepdim=True)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan, sign: int) -> Tensor:
        best = _of_all_ranks(extreme_of_tile(tile, span, sign), span, sign)
        ctx.save_for_backward(tile, best)
        ctx.span = span
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, best = ctx.saved_tensors
        span, comm = ctx.span, ctx.span.comm
        equal = tile == span.local(best)
        ties = span.local_sum(equal.sum(span.dims, keepdim=True), "amax ties")
        share = span.local(sum_over_ranks(comm, grad, "amax backward")) / ties
        return equal * share, None, None


def extreme(tile: Tensor, span: ReductionSpan, sign: int) -> Tensor:
    """The maximum (sign 1) or minimum (-1) over the whole image, in the full size."""
    best: Tensor = _Extreme.apply(tile, span, sign)  # type: ignore[no-untyped-call]
    return best


def _amax(func: Function, x: SpatialTensor, dim: Any, keepdim: bool, sign: int) -> Tensor:
    span = span_of(x, dim)
    if span.crosses:
        return extreme(to_tile(x), span, sign)
    return without_dims(x, func(to_tile(x), dim, keepdim), () if keepdim else span.dims)


def _register_amax(name: str, sign: int) -> None:
    @reduction(getattr(torch, name), getattr(Tensor, name))
    def amax(func: Function, input: SpatialTensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        return _amax(getattr(torch, name), input, dim, keepdim, sign)


_register_amax("amax", 1)
_register_amax("amin", -1)


@reduction(torch.aminmax, Tensor.aminmax)
def aminmax(
    func: Function, input: SpatialTensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    smallest = _amax(torch.amin, input, dim, keepdim, -1)
    return smallest, _amax(torch.amax, input, dim, keepdim, 1)


# --- indices


def _first_of_tile(
    tile: Tensor, dim: int | None, sign: int, places: Tensor, span: ReductionSpan
) -> tuple[Tensor, Tensor]:
    """The extreme of this tile and its global index, `_BEYOND` if the tile is empty."""
    value = extreme_of_tile(tile, span, sign)
    if tile.numel() == 0:
        return value, torch.full(value.shape, _BEYOND, device=tile.device)
    find = torch.argmax if sign > 0 else torch.argmin
    if tile.dtype == torch.bool:  # supported by ``max`` and ``min``, but not by argmax and argmin
        tile = tile.byte()
    if dim is None:
        return value, places.flatten()[find(tile)].reshape(value.shape)
    return value, places[find(tile, dim, keepdim=True)]


_BEYOND = torch.iinfo(torch.int64).max


def first_extreme(x: SpatialTensor, dim: int | None, sign: int) -> tuple[Tensor, ReductionSpan]:
    """The index of the first extreme along `dim` (None: in the flattened image), in full size."""
    span, tile = span_of(x, dim), to_tile(x).detach()
    places = _places(x) if dim is None else positions_on(x, dim)
    value, place = _first_of_tile(tile, dim, sign, places, span)
    comm = span.comm
    values = gather_over_ranks(comm, span.place(value, _least(value.dtype, sign)), "argmax")
    rivals = gather_over_ranks(comm, span.place(place, _BEYOND), "argmax")
    best = values.amax(0) if sign > 0 else values.amin(0)
    wins = (values == best) | (values.isnan() & best.isnan())
    return rivals.masked_fill(~wins, _BEYOND).amin(0), span


def _places(x: SpatialTensor) -> Tensor:
    """The indices of this tile's elements in the flattened whole tensor."""
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, size in enumerate(x.shape):
        places = places[..., None] * size + positions_on(x, dim)
    return places


class _ValuesAt(torch.autograd.Function):
    """The values at given indices; only these get a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, place: Tensor, own: Tensor, span: ReductionSpan, dim: int
    ) -> Tensor:
        shape = [1] * tile.dim()
        shape[dim] = -1
        chosen = own.view(shape) == span.local(place)
        ctx.save_for_backward(chosen)
        ctx.span = span
        part = torch.where(chosen, tile, 0).sum(span.dims, keepdim=True, dtype=tile.dtype)
        return sum_over_ranks(span.comm, span.place(part), "max")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,) = ctx.saved_tensors
        span = ctx.span
        total = span.local(sum_over_ranks(span.comm, grad, "max backward"))
        return torch.where(chosen, total, 0), None, None, None, None


def _with_places(
    func: Function, x: SpatialTensor, dim: int, keepdim: bool, sign: int
) -> tuple[Tensor, Tensor]:
    (number,) = dims_of(x, dim)
    if number not in split_dims(x):
        values, places = func(to_tile(x), dim, keepdim)
        removed = () if keepdim else (number,)
        return without_dims(x, values, removed), without_dims(x, places, removed)
    place, span = first_extreme(x, number, sign)
    tile = to_tile(x)
    own = positions_on(x, number)
    return _ValuesAt.apply(tile, place, own, span, number), place  # type: ignore[no-untyped-call]


def _max_or_min(
    func: Function, x: SpatialTensor, dim: Any = None, keepdim: bool = False, *, sign: int
) -> Tensor | tuple[Tensor, Tensor]:
    if dim is None:
        return extreme(to_tile(x), span_of(x, None), sign)
    return _with_places(func, x, dim, keepdim, sign)


def _register_max_and_min(func: Function, pairwise: Function, sign: int) -> None:
    """Register ``torch.max`` or ``torch.min``; with a second tensor they are pointwise."""
    reduce = check_call(func, partial(_max_or_min, sign=sign))

    def call(*args: Any, **kwargs: Any) -> Any:
        if "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)):
            return pairwise(*args, **kwargs)
        return reduce(*args, **kwargs)

    register_op(func, prefix=True)(call)


_register_max_and_min(torch.max, torch.maximum, 1)
_register_max_and_min(Tensor.max, torch.maximum, 1)
_register_max_and_min(torch.min, torch.minimum, -1)
_register_max_and_min(Tensor.min, torch.minimum, -1)


def _register_argmax(name: str, sign: int) -> None:
    @reduction(getattr(Tensor, name), getattr(torch, name))
    def argmax(
        func: Function, input: SpatialTensor, dim: int | None = None, keepdim: bool = False
    ) -> Tensor:
        if dim is None or dim % input.dim() in split_dims(input):
            return first_extreme(input, dim, sign)[0]
        places = func(to_tile(input), dim, keepdim)
        return without_dims(input, places, () if keepdim else dims_of(input, dim))


_register_argmax("argmax", 1)
_register_argmax("argmin", -1)
