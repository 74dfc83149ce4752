"""Softmax: local over channels, over the whole image for rows and columns.

As in PyTorch, the maximum, here of all ranks, is subtracted first for stability.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.spatial.autocast import in_float32
from spatialdl.spatial.reduce import log_sum_exp
from spatialdl.spatial.span import ReductionSpan, dims_of, on_meta, span_of, without_dims
from spatialdl.spatial.tensor import SpatialTensor, register_op, to_tile


class _Softmax(torch.autograd.Function):
    """Saves the result or its logarithm."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, span: ReductionSpan, log: bool) -> Tensor:
        y = tile - span.own(log_sum_exp(tile, span))
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
        total = span.own_sum(weighted.sum(span.dims, keepdim=True), "softmax backward")
        return (grad - y.exp() * total if ctx.log else weighted - y * total), None, None


def _softmax(x: SpatialTensor, dim: int | None, dtype: torch.dtype | None, log: bool) -> Tensor:
    function = torch.log_softmax if log else torch.softmax
    if dim is None:  # PyTorch's deprecated default
        dim = 0 if x.dim() in (0, 1, 3) else 1
    like = on_meta(function, x, dim, dtype)  # raises PyTorch's errors on all ranks
    span, tile = span_of(x, dims_of(x, dim)), to_tile(x)
    if not span.crosses:
        return without_dims(x, function(tile, dim, dtype), ())
    tile = in_float32(tile) if dtype is None else tile.to(dtype)
    wide = torch.promote_types(tile.dtype, torch.float32)
    y: Tensor = _Softmax.apply(tile.to(wide), span, log)  # type: ignore[no-untyped-call]
    result = like.dtype if tile.dtype == like.dtype else tile.dtype
    return without_dims(x, y.to(result), ())


@register_op(
    torch.softmax, torch.Tensor.softmax, torch.special.softmax, split=("input",), prefix=True
)
def softmax(input: SpatialTensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _softmax(input, dim, dtype, log=False)


@register_op(
    torch.log_softmax,
    torch.Tensor.log_softmax,
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


@register_op(F.softmin, split=("input",), prefix=True)
def softmin(
    input: SpatialTensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    negative: Any = -input
    return _softmax(negative, dim, dtype, log=False)
