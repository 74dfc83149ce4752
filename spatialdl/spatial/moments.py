"""Mean and variance over any dims of a split tensor.

Each rank computes mean and squared deviations of its tile. Counts, means and deviations are
combined in float64 (Chan, Golub, LeVeque 1979). Raw sums of squares in float32 would be off by
1e-2 where the mean is 1,000 times the deviation. The result is bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.spatial.autocast import wide, wide_type
from spatialdl.spatial.span import ReductionSpan, reduction, span_of, without_dims
from spatialdl.spatial.tensor import SpatialTensor, to_tile

Function = Callable[..., Any]


def tile_moments(tile: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of a tile over `dims`, kept as dims; float64."""
    if tile.numel() == 0:
        zeros = tile.sum(dims, keepdim=True).double()
        return zeros, zeros, zeros
    variance, mean = torch.var_mean(wide(tile), dims, correction=0, keepdim=True)
    mean, variance = mean.double(), variance.double()
    count = tile.numel() / mean.numel()
    return torch.full_like(mean, count), mean, variance * count


def combine_moments(counts: Tensor, means: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and squared deviations of all parts together, from those of each, (parts, ...)."""
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    deviation = (deviations + counts * (means - mean).square()).sum(0)
    return mean, deviation


def moments_over(tile: Tensor, span: ReductionSpan, name: str) -> tuple[Tensor, Tensor]:
    """Mean and squared deviations over a span that crosses ranks, in the full size; float64."""
    parts = tile_moments(tile, span.dims)
    message = torch.stack([span.place(part) for part in parts])
    gathered = gather_over_ranks(span.comm, message, name)
    return combine_moments(*gathered.unbind(1))


class _Moments(torch.autograd.Function):
    """Saves the tile and its mean."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan) -> tuple[Tensor, Tensor]:
        mean, deviation = moments_over(tile, span, "var")
        ctx.span = span
        ctx.save_for_backward(tile, mean)
        result = wide_type(tile.dtype)
        return mean.to(result), deviation.to(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_deviation: Tensor) -> tuple[Tensor | None, ...]:
        tile, mean = ctx.saved_tensors
        span = ctx.span
        grads = torch.stack([grad_mean, grad_deviation])
        grads = sum_over_ranks(span.comm, grads, "var backward")
        grad_mean, grad_deviation = (span.local(grad) for grad in grads)
        centred = tile - span.local(mean).to(grad_mean.dtype)
        return (grad_mean / span.count + 2 * grad_deviation * centred).to(tile.dtype), None


def _variance(
    func: Function,
    x: SpatialTensor,
    dim: Any,
    keepdim: bool,
    correction: float,
    deviation: bool,
    with_mean: bool,
) -> Any:
    span = span_of(x, dim)
    if not span.crosses:
        result = func(to_tile(x), dim, correction=correction, keepdim=keepdim)
        removed = () if keepdim else span.dims
        if with_mean:
            return tuple(without_dims(x, value, removed) for value in result)
        return without_dims(x, result, removed)
    mean, squares = _Moments.apply(to_tile(x), span)  # type: ignore[no-untyped-call]
    value = squares / torch.tensor(max(span.count - correction, 0), dtype=squares.dtype)
    if deviation:  # for zero deviation the gradient is zero, as in PyTorch
        zero = value == 0
        value = value.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    value = value.to(x.dtype)
    return (value, mean.to(x.dtype)) if with_mean else value


def _register(func: Function, deviation: bool, with_mean: bool) -> None:
    @reduction(func)
    def variance(
        func: Function,
        input: SpatialTensor,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # var(input, unbiased)
            dim, unbiased = None, dim
        if correction is None:
            correction = int(unbiased)
        return _variance(func, input, dim, keepdim, correction, deviation, with_mean)


for _func in (torch.var, Tensor.var):
    _register(_func, deviation=False, with_mean=False)
for _func in (torch.std, Tensor.std):
    _register(_func, deviation=True, with_mean=False)
_register(torch.var_mean, deviation=False, with_mean=True)
_register(torch.std_mean, deviation=True, with_mean=True)
