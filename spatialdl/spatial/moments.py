"""Mean and variance over any dims of a split tensor; LayerNorm and RMSNorm.

Each rank computes mean and squared deviations of its tile. Counts, means and deviations are
combined in float64 (Chan, Golub, LeVeque 1979). Raw sums of squares in float32 would be off by
1e-2 where the mean is 1,000 times the deviation. The result is bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.spatial.autocast import HALF, in_float32
from spatialdl.spatial.span import ReductionSpan, on_meta, reduction, span_of, without_dims
from spatialdl.spatial.tensor import SpatialTensor, register_op, to_tile

Function = Callable[..., Any]


def tile_moments(tile: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of a tile over `dims`, kept as dims; float64."""
    if tile.numel() == 0:
        zeros = tile.sum(dims, keepdim=True).double()
        return zeros, zeros, zeros
    wide = tile.float() if tile.dtype in HALF else tile
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    mean, variance = mean.double(), variance.double()
    count = tile.numel() / mean.numel()
    return torch.full_like(mean, count), mean, variance * count


def combined(counts: Tensor, means: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and squared deviations of all parts together, from those of each, (parts, ...)."""
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    deviation = (deviations + counts * (means - mean).square()).sum(0)
    return mean, deviation


def moments_over(tile: Tensor, span: ReductionSpan, name: str) -> tuple[Tensor, Tensor]:
    """Mean and squared deviations over a span that crosses ranks, in the full size; float64."""
    parts = tile_moments(tile, span.dims)
    message = torch.stack([span.placed(part) for part in parts])
    gathered = gather_over_ranks(span.comm, message, name)
    return combined(*gathered.unbind(1))


class _Moments(torch.autograd.Function):
    """Saves the tile and its mean."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan) -> tuple[Tensor, Tensor]:
        mean, deviation = moments_over(tile, span, "var")
        ctx.span = span
        ctx.save_for_backward(tile, mean)
        result = torch.float32 if tile.dtype in HALF else tile.dtype
        return mean.to(result), deviation.to(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_deviation: Tensor) -> tuple[Tensor | None, ...]:
        tile, mean = ctx.saved_tensors
        span = ctx.span
        grads = torch.stack([grad_mean, grad_deviation])
        grads = sum_over_ranks(span.comm, grads, "var backward")
        grad_mean, grad_deviation = (span.own(grad) for grad in grads)
        centred = tile - span.own(mean).to(grad_mean.dtype)
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


# --- LayerNorm and RMSNorm


class _Standardised(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)`` over a span; saves the tile and its statistics."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan, eps: float) -> Tensor:
        mean, deviation = (span.own(value) for value in moments_over(tile, span, "layer_norm"))
        scale = (deviation / span.count + eps).rsqrt()
        wide = torch.float32 if tile.dtype in HALF else tile.dtype
        mean, scale = mean.to(wide), scale.to(wide)
        ctx.save_for_backward(tile, mean, scale)
        ctx.span = span
        return ((tile - mean) * scale).to(tile.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, mean, scale = ctx.saved_tensors
        span = ctx.span
        y = (tile - mean) * scale
        parts = [part.sum(span.dims, keepdim=True).double() for part in (grad, grad * y)]
        means = (span.own_sum(part, "layer_norm backward") / span.count for part in parts)
        mean_grad, mean_projection = (value.to(scale.dtype) for value in means)
        return (scale * (grad - mean_grad - y * mean_projection)).to(grad.dtype), None, None


def standardised(tile: Tensor, span: ReductionSpan, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over a span that crosses ranks; differentiable."""
    y: Tensor = _Standardised.apply(in_float32(tile), span, eps)  # type: ignore[no-untyped-call]
    return y


def _last_dims(x: SpatialTensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.dim() - len(shape), x.dim()))


def _same_type(y: Tensor, *factors: Tensor | None) -> list[Tensor | None]:
    return [None if factor is None else factor.to(y.dtype) for factor in factors]


@register_op(F.layer_norm, torch.layer_norm, split=("input",), prefix=True)
def layer_norm(
    input: SpatialTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # torch.layer_norm only
) -> Tensor:
    on_meta(F.layer_norm, input, normalized_shape)  # raises PyTorch's errors on all ranks
    span = span_of(input, _last_dims(input, normalized_shape))
    if not span.crosses:
        y = F.layer_norm(to_tile(input), normalized_shape, weight, bias, eps)
        return without_dims(input, y, ())
    y = without_dims(input, standardised(to_tile(input), span, eps), ())
    weight, bias = _same_type(y, weight, bias)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@register_op(torch.rms_norm, F.rms_norm, split=("input",), prefix=True)
def rms_norm(
    input: SpatialTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    on_meta(F.rms_norm, input, normalized_shape)
    span = span_of(input, _last_dims(input, normalized_shape))
    tile = to_tile(input)
    if not span.crosses:
        return without_dims(input, F.rms_norm(tile, normalized_shape, weight, eps), ())
    if eps is None:
        eps = torch.finfo(tile.dtype).eps
    wide = tile.float() if tile.dtype in HALF else tile
    squares = span.sum(wide.square().sum(span.dims, keepdim=True), "rms_norm") / span.count
    y = without_dims(input, (wide * span.own((squares + eps).rsqrt())).to(tile.dtype), ())
    (weight,) = _same_type(y, weight)
    return y if weight is None else y * weight
