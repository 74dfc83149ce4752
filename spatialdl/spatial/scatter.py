"""Gathering and scattering along a dim that is not split, and one-hot maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.reduce import max_over_ranks
from spatialdl.spatial.operands import lift, own_box_of
from spatialdl.spatial.span import split_dims, without_dims
from spatialdl.spatial.table import spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile

Function = Callable[..., Any]


def _check(func: Function, x: SpatialTensor, dim: int, *operands: Any) -> None:
    """Refuse a split `dim` and operands of different spatial sizes."""
    if dim % x.dim() in split_dims(x):
        raise refusal(func, [x], f"dim {dim} is split; use a dim that is not")
    for other in operands:
        if isinstance(other, Tensor) and other.dim() != x.dim():
            raise refusal(func, [x], f"another operand has {other.dim()} dims")
        if isinstance(other, Tensor) and any(other.shape[d] != x.shape[d] for d in split_dims(x)):
            raise refusal(func, [x], f"another operand has shape {tuple(other.shape)}")


def _tile_of(func: Function, value: Any, x: SpatialTensor) -> Any:
    """The tile of a tensor with the spatial dims of `x` and any size in the other dims."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SpatialTensor):
        return to_tile(lift(func, value, x, value.shape))  # type: ignore[arg-type]
    return to_tile(own_box_of(func, value, x, value.shape))


def _first(*operands: Any) -> SpatialTensor:
    return next(value for value in operands if isinstance(value, SpatialTensor))


@register_op(torch.gather, Tensor.gather, split=("input", "index"))
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    first = _first(input, index)
    _check(torch.gather, first, dim, input, index)
    tile = _tile_of(torch.gather, input, first)
    return without_dims(first, tile.gather(dim, _tile_of(torch.gather, index, first)), ())


@register_op(torch.take_along_dim, Tensor.take_along_dim, split=("input", "indices"))
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    func, first = torch.take_along_dim, _first(input, indices)
    if dim is None:
        raise refusal(func, [first], "without dim it indexes all pixels; pass a dim not split")
    _check(func, first, dim, input, indices)
    taken = func(_tile_of(func, input, first), _tile_of(func, indices, first), dim)
    return without_dims(first, taken, ())


def _scattered(func: Function, x: Tensor, dim: int, index: Tensor, src: Any, kwargs: Any) -> Tensor:
    first = _first(x, index, src)
    _check(func, first, dim, x, index, src)
    tile, places, values = (_tile_of(func, value, first) for value in (x, index, src))
    return without_dims(first, func(tile, dim, places, values, **kwargs), ())


def _register(func: Function, in_place: Function) -> None:
    @register_op(func, getattr(Tensor, func.__name__))
    def scatter(input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any) -> Tensor:
        values = src[0] if src else kwargs.pop("src", kwargs.pop("value", None))
        return _scattered(func, input, dim, index, values, kwargs)

    @register_op(in_place)
    def scatter_(input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any) -> Tensor:
        result = scatter(input, dim, index, *src, **kwargs)
        if isinstance(input, SpatialTensor):
            return input.copy_(result)
        return _replaced(in_place, input, result)


def _replaced(func: Function, whole: Tensor, result: Tensor) -> Tensor:
    """The split result of an in-place operation of a split tensor on a whole one.

    ``torch.zeros(size).scatter_(1, labels, 1)`` is a common way to make one-hot maps. The whole
    tensor does not contain the result, so it is emptied and cannot be used any more.
    """
    if whole.requires_grad or not whole.is_contiguous() or whole._is_view():
        raise refusal(
            func, spatial_in([result]), "a split tensor cannot be written to a whole one in place"
        )
    whole.set_()  # type: ignore[call-overload]
    return result


_register(torch.scatter, Tensor.scatter_)
_register(torch.scatter_add, Tensor.scatter_add_)


@register_op(F.one_hot)
def one_hot(tensor: SpatialTensor, num_classes: int = -1) -> Tensor:
    tile, comm = to_tile(tensor), tensor.mesh.grid_comm
    if num_classes == -1:
        highest = tile.amax() if tile.numel() > 0 else tile.new_zeros(())
        num_classes = int(max_over_ranks(comm, highest, "one_hot")) + 1
    if tile.numel() > 0:
        hot = F.one_hot(tile, num_classes)
    else:
        hot = tile.new_zeros((*tile.shape, num_classes))
    dims = tensor.spatial_dims.moved(lambda dim: dim - 1)
    return from_tile(hot, tensor.spatial_layout, tensor.mesh, dims)
