"""Functions of torch.nn.functional that are pointwise but do not reach PyTorch's own check.

Most pointwise operations need nothing here: PyTorch marks them, and the guard lets them through.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile


def _identity_or_refuse(func: object, x: SpatialTensor, p: float, training: bool) -> Tensor:
    if not training or p == 0.0:
        return x
    raise refusal(
        func, [x], "random masks over a split image are not supported yet; set p=0 or use eval()"
    )


@register_op(F.dropout)
def dropout(
    input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _identity_or_refuse(F.dropout, input, p, training)


@register_op(F.dropout2d)
def dropout2d(
    input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _identity_or_refuse(F.dropout2d, input, p, training)


@register_op(F.prelu)
@register_op(torch.prelu)
def prelu(input: SpatialTensor, weight: Tensor) -> Tensor:
    tile = F.prelu(to_tile(input), weight)  # a weight per channel, or one for all
    return from_tile(tile, input.spatial_layout, input.mesh)


@register_op(torch.Tensor.contiguous)
def contiguous(
    input: SpatialTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    return input.clone(memory_format=memory_format)
