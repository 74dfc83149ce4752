"""LayerNorm and RMSNorm over any last dims.

Where ranks have parts of these dims, each span of normalised elements becomes a channel of one
sample, so that BatchNorm's kernels compute the result in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.autocast import in_float32, wide
from spatialdl.spatial.moments import moments_over
from spatialdl.spatial.norm import ChannelMoments, Standardize, as_channels
from spatialdl.spatial.span import ReductionSpan, span_of, without_dims
from spatialdl.spatial.tensor import SpatialTensor, register_op, to_tile


def standardize_over(tile: Tensor, span: ReductionSpan, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the last dims of a tile; differentiable.

    Args:
        span: the last dims, of which ranks have parts.
    """
    kept = tile.shape[: min(span.dims)]
    ones = (1,) * len(span.dims)

    def add_up(sums: Tensor) -> Tensor:
        parts = (span.local_sum(part.view(*kept, *ones), "layer_norm backward") for part in sums)
        return torch.stack([part.flatten() for part in parts])

    with torch.no_grad():
        mean, deviation = moments_over(tile, span, "layer_norm")
        mean, variance = (span.local(one).flatten() for one in (mean, deviation / span.count))
        moments = ChannelMoments(span.count, mean, variance).of(tile)
    image = as_channels(tile, prod(kept))
    y: Tensor = Standardize.apply(image, None, None, moments, eps, add_up)  # type: ignore[no-untyped-call]
    return y.view(tile.shape)


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
    span = span_of(input, _last_dims(input, normalized_shape))
    if not span.crosses:
        y = F.layer_norm(to_tile(input), normalized_shape, weight, bias, eps)
        return without_dims(input, y, ())
    y = without_dims(input, standardize_over(in_float32(to_tile(input)), span, eps), ())
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
    span = span_of(input, _last_dims(input, normalized_shape))
    tile = to_tile(input)
    if not span.crosses:
        return without_dims(input, F.rms_norm(tile, normalized_shape, weight, eps), ())
    if eps is None:
        eps = torch.finfo(tile.dtype).eps
    x = wide(tile)
    squares = span.sum(x.square().sum(span.dims, keepdim=True), "rms_norm") / span.count
    y = without_dims(input, (x * span.local((squares + eps).rsqrt())).to(tile.dtype), ())
    (weight,) = _same_type(y, weight)
    return y if weight is None else y * weight
