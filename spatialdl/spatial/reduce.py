"""Reductions over the whole image: global pooling, sum, mean.

Their result is a plain tensor, the same on every rank, with which the rest of the network goes on
as usual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.reduce import differentiable_sum
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile


def _image_sum(x: SpatialTensor, dims: tuple[int, ...], keepdim: bool, name: str) -> Tensor:
    tile = to_tile(x)
    return differentiable_sum(x.mesh.grid_comm, tile.sum(dims, keepdim=keepdim), name)


@register_op(F.adaptive_avg_pool2d)
@register_op(torch._C._nn.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: SpatialTensor, output_size: Any) -> Tensor:
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    if sizes != (1, 1):
        raise refusal(
            F.adaptive_avg_pool2d,
            [input],
            f"a split image can be pooled to 1x1 only, not to {output_size}; call full_tensor() "
            "before it",
        )
    height, width = input.shape[-2:]
    return _image_sum(input, (-2, -1), True, "adaptive_avg_pool2d") / (height * width)


def _reduce(func: Any, x: SpatialTensor, dim: Any, keepdim: bool, mean: bool) -> Tensor:
    every = tuple(range(x.dim()))
    if dim is None or dim == ():
        dims = every
    else:
        dims = tuple(d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim))
    split = {x.dim() - 2, x.dim() - 1}
    count = 1
    for d in dims:
        count *= x.shape[d]
    if split <= set(dims):
        total = _image_sum(x, dims, keepdim, func.__name__)
    elif not split & set(dims) and 0 not in dims and keepdim:
        total = from_tile(to_tile(x).sum(dims, keepdim=True), x.spatial_layout, x.mesh)
    else:
        raise refusal(
            func, [x], f"reduce over both image dims, or over channels with keepdim; not {dim}"
        )
    return total / count if mean else total


@register_op(Tensor.sum)
@register_op(torch.sum)
def image_sum(
    input: SpatialTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    source: Any = input if dtype is None else input.to(dtype)
    return _reduce(torch.sum, source, dim, keepdim, mean=False)


@register_op(Tensor.mean)
@register_op(torch.mean)
def image_mean(
    input: SpatialTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    source: Any = input if dtype is None else input.to(dtype)
    return _reduce(torch.mean, source, dim, keepdim, mean=True)
