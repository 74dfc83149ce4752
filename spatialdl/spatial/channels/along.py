"""Operations that are independent of the channel, applied to each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.along import region_of
from spatialdl.spatial.channels.tensor import (
    ChannelTensor,
    channel_op,
    divided_op,
    is_divided,
    pointwise,
)
from spatialdl.spatial.random.composite import argument, functions_of, numbers_of
from spatialdl.spatial.random.generator import TensorRegion
from spatialdl.spatial.random.plain import Drawing, dropouts
from spatialdl.spatial.random.streams import full_region, next_key
from spatialdl.spatial.span import without_dims
from spatialdl.spatial.tensor import SpatialTensor, to_tile


def _each_channel(function: Any, dims: int | None = None) -> None:
    """Register a function of maps with `dims` spatial dims; with any number if None."""

    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        if input.at != 1 or input.dim() < 3 or input.dim() != (dims or input.dim() - 2) + 2:
            return NotImplemented  # e.g. without a dim of samples
        result = function(input.part, *args, **kwargs)
        return tuple(map(input.like, result)) if isinstance(result, tuple) else input.like(result)


for _dims in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool"):
        _each_channel(getattr(F, f"{_name}{_dims}d"), _dims)
_each_channel(F.interpolate)
_each_channel(F.upsample)


@divided_op(F.pad)
def pad(input: ChannelTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    from_end = input.dim() - input.at
    if any(pad[2 * from_end - 2 : 2 * from_end]) or (
        mode != "constant" and len(pad) // 2 >= from_end
    ):
        return NotImplemented
    return input.like(F.pad(input.part, pad, mode, value))


def _unchanged(function: Any) -> None:
    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, ChannelTensor) for one in args):
            return NotImplemented
        return input.like(function(input.part, *args, **kwargs))


@divided_op(Tensor.contiguous)
def contiguous(
    input: ChannelTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    if input.stand_in().is_contiguous(memory_format=memory_format):
        return input
    return input.like(input.part.clone(memory_format=memory_format))


@divided_op(Tensor.to)
def to(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(one, ChannelTensor) for one in args):
        return NotImplemented
    converted = input.like(input.part.to(*args, **kwargs))
    kept = kwargs.get("memory_format", torch.preserve_format)
    return converted if kept is torch.preserve_format else contiguous(converted, kept)


for _function in (
    *functions_of(Tensor, "float double half bfloat16 clone detach cpu cuda"),
    *functions_of(torch, "clone detach zeros_like ones_like full_like empty_like"),
):
    _unchanged(_function)


@channel_op(Tensor.copy_)
def copy_(input: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    """Copy to the part; whole weights are written with all channels."""
    if not is_divided(input):
        return NotImplemented
    return pointwise(Tensor.copy_, (input, src, non_blocking), {})


def _new(function: Any) -> None:
    """Register a factory function, which uses only the dtype and device of its input."""

    @channel_op(function)
    def handler(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        like = input.part if isinstance(input, ChannelTensor) else input
        return function(like, *args, **kwargs)


for _name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
    _new(getattr(Tensor, _name))


# --- reductions, and functions along a dim


def _along(function: Any, place: int = 0) -> None:
    """Register a function along dims other than the channel dim, its argument number `place`."""

    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        dims = argument("dim", place, args, kwargs, kwargs.get("dims"))
        axes = (dims,) if isinstance(dims, int) else dims
        if isinstance(dims, bool) or not isinstance(axes, tuple | list):
            return NotImplemented
        places = {dim % input.dim() for dim in axes}
        if not places or input.at in places:
            return NotImplemented
        result = function(input.part, *args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        gone = input.dim() > first.dim()
        at = input.at - sum(dim < input.at for dim in places) * gone
        if isinstance(result, Tensor):
            return input.like(result, at)
        return type(result)([input.like(first, at) for first in result])


_REDUCING = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "max", "min")
for _holder in (torch, Tensor):
    for _name in (*_REDUCING, "softmax", "log_softmax", "cumsum"):
        _along(getattr(_holder, _name))
    _along(_holder.roll, place=1)
_along(torch.flip)
_along(torch.linalg.vector_norm, place=1)


@divided_op(Tensor.flip)
def flip(input: ChannelTensor, *dims: Any) -> Any:
    return torch.flip(input, tuple(numbers_of(dims)))


# --- random numbers


def _region(x: ChannelTensor) -> TensorRegion:
    """The region of the whole tensor that a rank's channels cover."""
    inner = x.part
    region = region_of(inner) if isinstance(inner, SpatialTensor) else full_region(inner.shape)
    positions = list(region.positions)
    held = x.partition.held(x.comm.rank)
    positions[x.at] = torch.cat([torch.arange(start, stop) for start, stop in held])
    return TensorRegion(tuple(positions), tuple(x.shape))


def _tile(x: ChannelTensor) -> Tensor:
    return to_tile(x.part) if isinstance(x.part, SpatialTensor) else x.part


def _like(x: ChannelTensor, tile: Tensor) -> ChannelTensor:
    part = x.part
    return x.like(without_dims(part, tile, ()) if isinstance(part, SpatialTensor) else tile)


_DIVIDED = Drawing(_region, lambda x: next_key(), _tile, _like)
for _function, _handler in dropouts(_DIVIDED).items():
    divided_op(_function)(_handler)
