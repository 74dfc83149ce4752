"""Operations that are local because they run along dims that are not split, or in each pixel.

Sorting, cumulative sums and order statistics; gathering and scattering; one-hot maps; pointwise
functions of torch.nn.functional that need a handler. Most pointwise operations need none: PyTorch
tags them, and they run on the tiles. Dropout and random numbers: each rank draws those of its own
pixels by `spatialdl.spatial.random`, and whole channels are dropped consistently on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.reduce import max_over_ranks
from spatialdl.spatial.norm import check_channels
from spatialdl.spatial.operands import lift, own_box_of
from spatialdl.spatial.random.composite import argument
from spatialdl.spatial.random.generator import TensorRegion
from spatialdl.spatial.random.plain import Drawing, random_functions
from spatialdl.spatial.random.streams import next_key
from spatialdl.spatial.span import check_call, dims_of, positions, split_dims, without_dims
from spatialdl.spatial.table import spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile

Function = Callable[..., Any]

# Position of `dim` in the arguments, and its default (None: no default).
_ALONG: dict[str, tuple[int, int | None]] = {
    "cumsum": (1, None),
    "cumprod": (1, None),
    "cummax": (1, None),
    "cummin": (1, None),
    "logcumsumexp": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "median": (1, None),
    "nanmedian": (1, None),
    "mode": (1, -1),
    "quantile": (2, None),
    "nanquantile": (2, None),
}
_REMOVES = {"kthvalue": 3, "median": 2, "nanmedian": 2, "mode": 2}  # position of `keepdim`


def _register(func: Function, name: str) -> None:
    place, default = _ALONG[name]

    def along(func: Function, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
        dim = argument("dim", place - 1, args, kwargs, default)
        if isinstance(dim, bool):  # sort(input, descending)
            dim = default
        if dim is None or name.endswith("quantile") or dim % x.dim() in split_dims(x):
            raise refusal(
                func,
                [x],
                f"it needs all pixels along dim {dim} on one rank; use dims of samples or "
                "channels, or call full_tensor() before it",
            )
        removed: tuple[int, ...] = ()
        if name in _REMOVES:
            keepdim = argument("keepdim", _REMOVES[name] - 1, args, kwargs)
            removed = () if keepdim else dims_of(x, dim)
        result = func(to_tile(x), *args, **kwargs)
        if isinstance(result, Tensor):
            return without_dims(x, result, removed)
        return tuple(without_dims(x, value, removed) for value in result)

    register_op(func)(check_call(func, along))


for _name in _ALONG:
    for _holder in (torch, Tensor):
        _register(getattr(_holder, _name), _name)


# --- gathering and scattering, one-hot maps


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


def _scatter_tiles(
    func: Function, x: Tensor, dim: int, index: Tensor, src: Any, kwargs: Any
) -> Tensor:
    first = _first(x, index, src)
    _check(func, first, dim, x, index, src)
    tile, places, values = (_tile_of(func, value, first) for value in (x, index, src))
    return without_dims(first, func(tile, dim, places, values, **kwargs), ())


def _register_scatter(func: Function, in_place: Function) -> None:
    @register_op(func, getattr(Tensor, func.__name__))
    def scatter(input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any) -> Tensor:
        values = src[0] if src else kwargs.pop("src", kwargs.pop("value", None))
        return _scatter_tiles(func, input, dim, index, values, kwargs)

    @register_op(in_place)
    def scatter_(input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any) -> Tensor:
        result = scatter(input, dim, index, *src, **kwargs)
        if isinstance(input, SpatialTensor):
            return input.copy_(result)
        return _replace_full(in_place, input, result)


def _replace_full(func: Function, whole: Tensor, result: Tensor) -> Tensor:
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


_register_scatter(torch.scatter, Tensor.scatter_)
_register_scatter(torch.scatter_add, Tensor.scatter_add_)


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
    dims = tensor.spatial_dims.map_dims(lambda dim: dim - 1)
    return from_tile(hot, tensor.spatial_layout, tensor.mesh, dims)


# --- pointwise functions


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


# --- random numbers, by the functions that those of torch.nn.functional call


def region_of(x: SpatialTensor) -> TensorRegion:
    """The region of the whole tensor that the tile of `x` covers."""
    return TensorRegion(tuple(positions(x, dim) for dim in range(x.dim())), tuple(x.shape))


def _register_random(function: Callable[..., Any], handler: Callable[..., Tensor]) -> None:
    @register_op(function, split=("input",), prefix=True)
    @wraps(handler)
    def draw(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("generator") is not None:
            advice = "it draws from spatialdl.random.keyed, not from a generator"
            raise refusal(function, [input], advice)
        return handler(input, *args, **kwargs)


_SPLIT = Drawing(
    region_of, lambda x: next_key(x.mesh), to_tile, lambda x, tile: without_dims(x, tile, ())
)
for _function, _handler in random_functions(_SPLIT).items():
    _register_random(_function, _handler)
