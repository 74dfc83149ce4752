"""LayerNorm and RMSNorm: local over channels, with exchanged statistics over pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.spatial.autocast import HALF, in_float32
from spatialdl.spatial.moments import moments_over
from spatialdl.spatial.span import ReductionSpan, on_meta, span_of, without_dims
from spatialdl.spatial.tensor import SpatialTensor, register_op, to_tile


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
