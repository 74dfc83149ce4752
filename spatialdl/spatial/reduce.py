"""Reductions over any dims: sums, means, products, norms, counts; softmax.

Over rows or columns the result is a plain tensor, the same on every rank. Over other dims it is
split as the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import differentiable_gather, sum_over_ranks
from spatialdl.spatial.autocast import in_float32, wide_type
from spatialdl.spatial.extremes import extreme, extreme_of_tile
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.span import (
    ReductionSpan,
    dims_of,
    names_no_dims,
    reduction,
    span_of,
    without_dims,
)
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile

Function = Callable[..., Any]


def reduce_over(
    x: SpatialTensor,
    dim: Any,
    keepdim: bool,
    local: Callable[[Tensor], Tensor],
    across: Callable[[Tensor, ReductionSpan], Tensor],
) -> Tensor:
    """Reduce by `local`, or by `across` with the span if the reduced dims are split."""
    span = span_of(x, dim)
    if span.crosses and x.mesh.grid_comm.size == 1:
        return local(to_tile(x))
    if span.crosses:
        return across(to_tile(x), span)
    return without_dims(x, local(to_tile(x)), () if keepdim else span.dims)


def _sum_type(tile: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    integral = not (tile.is_floating_point() or tile.is_complex())
    return dtype or (torch.int64 if integral else tile.dtype)


def _sum(
    tile: Tensor, span: ReductionSpan, dtype: torch.dtype | None = None, nan: bool = False
) -> Tensor:
    """The sum over a span; half precision is accumulated in float32."""
    result = _sum_type(tile, dtype)
    add = torch.nansum if nan else torch.sum
    part = add(tile, span.dims, keepdim=True, dtype=wide_type(result))
    return span.sum(part, "sum").to(result)


def _skips_nan(func: Function) -> bool:
    return func.__name__.startswith("nan")


@reduction(torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
def image_sum(
    func: Function,
    input: SpatialTensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    local = partial(func, dim=dim, keepdim=keepdim, dtype=dtype)
    return reduce_over(input, dim, keepdim, local, partial(_sum, dtype=dtype, nan=_skips_nan(func)))


@reduction(torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean)
def image_mean(
    func: Function,
    input: SpatialTensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    def across(tile: Tensor, span: ReductionSpan) -> Tensor:
        result = dtype or tile.dtype
        wide = wide_type(result)
        if not _skips_nan(func):
            return (_sum(tile, span, wide) / span.count).to(result)
        present = (~tile.isnan()).sum(span.dims, keepdim=True)
        total = _sum(tile, span, wide, nan=True)
        return (total / span.sum(present, "nanmean")).to(result)

    local = partial(func, dim=dim, keepdim=keepdim, dtype=dtype)
    return reduce_over(input, dim, keepdim, local, across)


def _gather(part: Tensor, span: ReductionSpan, fill: float, name: str) -> Tensor:
    """The parts of all ranks in the full size, (ranks, ...); differentiable."""
    return differentiable_gather(span.comm, span.place(part, fill), name)


@reduction(torch.prod, Tensor.prod)
def image_prod(
    func: Function,
    input: SpatialTensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    def across(tile: Tensor, span: ReductionSpan) -> Tensor:
        result = _sum_type(tile, dtype)
        for d in span.dims:
            tile = tile.prod(d, keepdim=True, dtype=result)
        return _gather(tile, span, 1.0, "prod").prod(0)

    options = {} if dim is None else {"dim": dim, "keepdim": keepdim}
    return reduce_over(input, dim, keepdim, partial(func, dtype=dtype, **options), across)


class _LogSumExp(torch.autograd.Function):
    """Saves the tile and the result, as PyTorch does."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan) -> Tensor:
        total = log_sum_exp(tile, span)
        ctx.save_for_backward(tile, total)
        ctx.span = span
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, total = ctx.saved_tensors
        span = ctx.span
        grad = span.local(sum_over_ranks(span.comm, grad, "logsumexp backward"))
        total = span.local(total)
        return grad * (tile - total.masked_fill(total.isneginf(), 0)).exp(), None


def log_sum_exp(tile: Tensor, span: ReductionSpan) -> Tensor:
    """The log-sum-exp over the whole image, in the full size."""
    largest = span.max(extreme_of_tile(tile, span, 1), -math.inf, "logsumexp")
    shift = largest.masked_fill(largest.isinf(), 0)
    part = (tile - span.local(shift)).exp().sum(span.dims, keepdim=True)
    whole = sum_over_ranks(span.comm, span.place(part), "logsumexp")
    return whole.log() + shift


@reduction(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def image_logsumexp(
    func: Function, input: SpatialTensor, dim: Any, keepdim: bool = False
) -> Tensor:
    def across(tile: Tensor, span: ReductionSpan) -> Tensor:
        floating = tile if tile.is_floating_point() else tile.to(torch.get_default_dtype())
        total: Tensor = _LogSumExp.apply(floating, span)  # type: ignore[no-untyped-call]
        return total

    return reduce_over(input, dim, keepdim, partial(func, dim=dim, keepdim=keepdim), across)


def _norm(tile: Tensor, span: ReductionSpan, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norm over a span: the norm of the ranks' norms, except for orders 0 and infinity."""
    tile = tile.to(dtype or tile.dtype)
    if math.isinf(order):
        return extreme(tile.abs(), span, 1 if order > 0 else -1)
    result = tile.dtype
    if order == 0:
        return _sum((tile != 0).to(result) + 0 * tile.nan_to_num(0.0, 0.0, 0.0), span)
    wide = tile.abs().dtype if tile.is_complex() else torch.float64  # rounds roots once
    if tile.numel() > 0:
        part = torch.linalg.vector_norm(
            tile, order, span.dims, keepdim=True, dtype=None if tile.is_complex() else wide
        )
    else:
        empty = tile.abs().sum(span.dims, keepdim=True, dtype=wide)
        part = empty + (0.0 if order > 0 else math.inf)
    parts = _gather(part, span, 0.0 if order > 0 else math.inf, "norm")
    normed: Tensor = torch.linalg.vector_norm(parts, order, 0)
    return normed.to(wide if tile.is_complex() else result)


@reduction(torch.linalg.vector_norm)
def image_vector_norm(
    func: Function,
    x: SpatialTensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    local = partial(func, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)
    return reduce_over(x, dim, keepdim, local, partial(_norm, order=float(ord), dtype=dtype))


@reduction(torch.norm, Tensor.norm)
def image_norm(
    func: Function,
    input: SpatialTensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The p-norm of vectors; "fro" is the 2-norm."""
    if p == "nuc":
        raise refusal(func, [input], "a matrix norm cannot be combined from tiles")
    order = 2.0 if p in (None, "fro") else float(p)
    local = partial(torch.linalg.vector_norm, ord=order, dim=dim, keepdim=keepdim, dtype=dtype)
    return reduce_over(input, dim, keepdim, local, partial(_norm, order=order, dtype=dtype))


@reduction(torch.linalg.norm)
def image_linalg_norm(
    func: Function,
    input: SpatialTensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Vector norms and the Frobenius norm."""
    one_dim = dim is not None and len(dims_of(input, dim)) == 1
    if ord not in (None, "fro") and not one_dim:
        raise refusal(func, [input], "a matrix norm cannot be combined from tiles")
    normed: Tensor = image_norm(func, input, ord, dim, keepdim, dtype)
    return normed


@reduction(F.normalize)
def normalize(
    func: Function, input: SpatialTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12
) -> Tensor:
    norm: Tensor = torch.norm(input, p, dim, keepdim=True)
    return input / norm.clamp_min(eps)


@reduction(torch.any, Tensor.any, torch.all, Tensor.all)
def image_any_or_all(
    func: Function, input: SpatialTensor, dim: Any = None, keepdim: bool = False
) -> Tensor:
    """``any`` counts non-zero elements, ``all`` counts zeros."""
    if names_no_dims(dim):
        # Only these reductions take an empty `dim` as no dims; the rest take it as all dims.
        return without_dims(input, func(to_tile(input), dim=()), ())
    name, options = func.__name__, {} if dim is None else {"dim": dim, "keepdim": keepdim}

    def across(tile: Tensor, span: ReductionSpan) -> Tensor:
        counted = tile == 0 if name == "all" else tile != 0
        count = span.sum(counted.sum(span.dims, keepdim=True), name)
        decided = count == 0 if name == "all" else count > 0
        return decided.to(torch.uint8 if tile.dtype == torch.uint8 else torch.bool)

    return reduce_over(input, dim, keepdim, partial(func, **options), across)


@reduction(torch.count_nonzero, Tensor.count_nonzero)
def image_count_nonzero(func: Function, input: SpatialTensor, dim: Any = None) -> Tensor:
    def across(tile: Tensor, span: ReductionSpan) -> Tensor:
        return span.sum((tile != 0).sum(span.dims, keepdim=True), "count_nonzero")

    return reduce_over(input, dim, False, partial(func, dim=dim), across)


# --- softmax


class _Softmax(torch.autograd.Function):
    """Saves the result or its logarithm."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan, log: bool) -> Tensor:
        y = tile - span.local(log_sum_exp(tile, span))
        y = y if log else y.exp()
        ctx.save_for_backward(y)
        ctx.span, ctx.log = span, log
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        span = ctx.span
        weighted = grad if ctx.log else grad * y
        total = span.local_sum(weighted.sum(span.dims, keepdim=True), "softmax backward")
        return (grad - y.exp() * total if ctx.log else weighted - y * total), None, None


def _softmax(x: SpatialTensor, dim: int | None, dtype: torch.dtype | None, log: bool) -> Tensor:
    function = torch.log_softmax if log else torch.softmax
    if dim is None:  # PyTorch's deprecated default
        dim = 0 if x.dim() in (0, 1, 3) else 1
    like = meta_result(function, x, dim, dtype)  # raises PyTorch's errors on all ranks
    span, tile = span_of(x, dims_of(x, dim)), to_tile(x)
    if not span.crosses:
        return without_dims(x, function(tile, dim, dtype), ())
    tile = in_float32(tile) if dtype is None else tile.to(dtype)
    wide = torch.promote_types(tile.dtype, torch.float32)
    y: Tensor = _Softmax.apply(tile.to(wide), span, log)  # type: ignore[no-untyped-call]
    result = like.dtype if tile.dtype == like.dtype else tile.dtype
    return without_dims(x, y.to(result), ())


@register_op(torch.softmax, Tensor.softmax, torch.special.softmax, split=("input",), prefix=True)
def softmax(input: SpatialTensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _softmax(input, dim, dtype, log=False)


@register_op(
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
    split=("input",),
    prefix=True,
)
def log_softmax(input: SpatialTensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _softmax(input, dim, dtype, log=True)


@register_op(F.softmax, split=("input",), prefix=True)
def f_softmax(
    input: SpatialTensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _softmax(input, dim, dtype, log=False)


@register_op(F.log_softmax, split=("input",), prefix=True)
def f_log_softmax(
    input: SpatialTensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _softmax(input, dim, dtype, log=True)
