"""Pointwise functions of torch.nn.functional that need a handler.

Most pointwise operations need none: PyTorch tags them, and they run on the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.norm import check_channels
from spatialdl.spatial.span import on_meta, split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, refusal, register_op, to_tile


@register_op(F.prelu, torch.prelu, Tensor.prelu, split=("input",), prefix=True)
def prelu(input: SpatialTensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        check_channels("prelu", input)
    return without_dims(input, F.prelu(to_tile(input), weight), ())


@register_op(F.logsigmoid, split=("input",), prefix=True)
def logsigmoid(input: SpatialTensor) -> Tensor:
    return without_dims(input, F.logsigmoid(to_tile(input)), ())


@register_op(F.glu, split=("input",), prefix=True)
def glu(input: SpatialTensor, dim: int = -1) -> Tensor:
    on_meta(F.glu, input, dim)  # raises PyTorch's errors on all ranks
    if dim % input.dim() in split_dims(input):
        raise refusal(F.glu, [input], f"dim {dim} is split; use a dim that is not")
    return without_dims(input, F.glu(to_tile(input), dim), ())


@register_op(torch.masked_fill, Tensor.masked_fill, split=("input", "mask"), prefix=True)
def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``masked_fill`` by `torch.where`, which gives a trained value (a mask token) its gradient."""
    if isinstance(value, Tensor) and value.dim() > 0:
        raise ValueError(f"masked_fill takes one value, got a tensor {tuple(value.shape)}")
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=input.dtype, device=input.device)
    return torch.where(mask, value.to(input.dtype), input)


@register_op(Tensor.masked_fill_, split=("input", "mask"), prefix=True)
def masked_fill_(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    return input.copy_(masked_fill(input, mask, value))


@register_op(torch.Tensor.contiguous, prefix=True)
def contiguous(
    input: SpatialTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    return input.clone(memory_format=memory_format)


def _register_factory(func: Callable[..., Tensor]) -> None:
    @register_op(func, prefix=True)
    def factory(self: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor of the requested size, the same on every rank."""
        return func(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)


for _func in (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full):
    _register_factory(_func)
