"""The dims of a reduction of a split tensor, and the communication that it needs.

A reduction over rows or columns results in a plain tensor, the same on every rank. Each rank
reduces its tile and places the result in the full size (a sum over the rows alone still has all
columns). The ranks then combine their results. Reduced dims are kept as dims of size 1 here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import differentiable_sum, max_over_ranks, sum_over_ranks
from spatialdl.layout.layout import Box, Layout
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op


@dataclass(frozen=True)
class ReductionSpan:
    """The dims of a reduction, and the position of the tile in the kept dims.

    Attributes:
        dims: the reduced dims, not negative.
        count: number of elements of the whole tensor per result.
        crosses: whether spatial dims are reduced, so that ranks must communicate.
        kept: the split dims that are not reduced, each with the global positions of the tile in it
            and its global size; empty if `crosses` is False.
        comm: the ranks.
    """

    dims: tuple[int, ...]
    count: int
    crosses: bool
    kept: tuple[tuple[int, Tensor, int], ...]
    comm: Communicator

    def place(self, part: Tensor, fill: float = 0.0) -> Tensor:
        """`part`, of this tile, placed in the full size of the kept dims; `fill` elsewhere."""
        for dim, positions, size in self.kept:
            shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
            full = part.new_full(shape, fill)
            part = full.index_copy(dim, on(positions, part.device), part)
        return part

    def local(self, whole: Tensor) -> Tensor:
        """The part of `whole` (of the full size) that belongs to this tile."""
        for dim, positions, _ in self.kept:
            whole = whole.index_select(dim, on(positions, whole.device))
        return whole

    def sum(self, part: Tensor, name: str) -> Tensor:
        """The sum of the parts of all ranks, in the full size; differentiable."""
        return differentiable_sum(self.comm, self.place(part), name)

    def local_sum(self, part: Tensor, name: str) -> Tensor:
        """This tile's part of the sum over all ranks; not differentiable."""
        return self.local(sum_over_ranks(self.comm, self.place(part), name))

    def max(self, part: Tensor, lowest: float, name: str) -> Tensor:
        """The maximum over all ranks, in the full size; not differentiable."""
        return max_over_ranks(self.comm, self.place(part, lowest), name)


def names_no_dims(dim: Any) -> bool:
    """Whether `dim` is an empty tuple or list, which most reductions take as all dims."""
    return isinstance(dim, (tuple, list)) and len(dim) == 0


def dims_of(x: Tensor, dim: Any) -> tuple[int, ...]:
    """The dims of a reduction, not negative; None and () stand for all."""
    if dim is None or names_no_dims(dim):
        return tuple(range(x.dim()))
    chosen = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(d % x.dim() for d in chosen))


def split_dims(x: SpatialTensor) -> tuple[int, ...]:
    """The distinct dims that hold spatial dims, not negative."""
    return tuple(sorted({dim % x.dim() for dim in x.spatial_dims.at}))


def span_of(x: SpatialTensor, dim: Any) -> ReductionSpan:
    """The span of a reduction of `x` over `dim` (a number, several, or None for all)."""
    dims, split = dims_of(x, dim), split_dims(x)
    crosses = bool(set(dims) & set(split))
    kept = tuple((d, positions(x, d), x.shape[d]) for d in split if crosses and d not in dims)
    return ReductionSpan(dims, prod(x.shape[d] for d in dims), crosses, kept, x.mesh.grid_comm)


def positions(x: SpatialTensor, dim: int) -> Tensor:
    """The global positions in `dim` of the elements of this rank's tile; (tile's size,) int64."""
    number = dim % x.dim()
    if number not in split_dims(x):
        return torch.arange(x.shape[number])
    return positions_of(x, number - x.dim(), x.mesh.part)


def positions_of(x: SpatialTensor, dim: int, part: int) -> Tensor:
    """`positions` of the tile of any part, in a dim (negative) that holds spatial dims."""
    return positions_in(x.spatial_layout, x.spatial_dims, x.shape[dim], dim, part)


def positions_in(layout: Layout, dims: SpatialDims, size: int, dim: int, part: int) -> Tensor:
    """`positions` from a layout, in a dim (negative) of the global size `size`."""
    if dim not in dims.at:
        return torch.arange(size)
    own = _split_positions(layout, layout.boxes[part], dims.of_pixels, dim)
    return _with_tokens(own, dims, size, part == 0) if dims.extra_tokens else own


def positions_on(x: SpatialTensor, dim: int) -> Tensor:
    """`positions` on the device of the tile."""
    number = dim % x.dim()
    if number not in split_dims(x):
        return torch.arange(x.shape[number], device=x.device)
    return on(positions(x, dim), x.device)


@lru_cache(maxsize=4096)
def _split_positions(layout: Layout, box: Box, dims: SpatialDims, dim: int) -> Tensor:
    result = torch.zeros(1, dtype=torch.int64)
    for at, outer, size, (start, stop) in zip(
        dims.at, dims.outer, layout.size, box.spatial, strict=True
    ):
        if at == dim:
            blocks = torch.arange(outer)[:, None] * size + torch.arange(start, stop)
            result = (result[:, None] * (outer * size) + blocks.flatten()).flatten()
    return result


@lru_cache(maxsize=4096)
def _with_tokens(pixels: Tensor, dims: SpatialDims, size: int, is_first: bool) -> Tensor:
    """The positions of pixels in a dim of `size` that also has extra tokens."""
    pixels = pixels + dims.prefix
    if not is_first:
        return pixels
    return torch.cat([torch.arange(dims.prefix), pixels, torch.arange(size - dims.suffix, size)])


def without_dims(x: SpatialTensor, tile: Tensor, removed: tuple[int, ...]) -> SpatialTensor:
    """`tile` split as `x`, from which the dims `removed`, not split, were removed."""
    if not removed:
        return from_tile(tile, x.spatial_layout, x.mesh, x.spatial_dims)
    dims = x.spatial_dims.map_dims(lambda old: old + sum(d > old + x.dim() for d in removed))
    return from_tile(tile, x.spatial_layout, x.mesh, dims)


# --- registration of reductions

Call = Callable[..., Any]
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input"}
_WRONG_ON_META = ("nansum", "nanmean")
"""These take an empty `dim` as all dims, except on the meta device, which is used for shapes."""


def reduction(*functions: Call) -> Callable[[Call], Call]:
    """Register a reduction under several names.

    The decorated handler takes the called function and its arguments, and returns the result with
    or without the reduced dims. The call first runs without data: this determines the shape of the
    result, and raises PyTorch's errors (a dim out of range, a dtype) on all ranks.
    """

    def register(handler: Call) -> Call:
        for function in functions:
            register_op(function, prefix=True)(check_call(function, handler))
        return handler

    return register


def check_call(function: Call, handler: Call) -> Call:
    """Wrap the handler of a reduction as `reduction` registers it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
        if kwargs.get("out") is None:
            kwargs.pop("out", None)
        if function.__name__ in _WRONG_ON_META:
            args = tuple(None if names_no_dims(value) else value for value in args)
            kwargs = {k: None if names_no_dims(value) else value for k, value in kwargs.items()}
        x = args[0] if args else kwargs.pop("input")
        others = [*args[1:], *kwargs.values()]
        if not isinstance(x, SpatialTensor) or any(isinstance(o, Tensor) for o in others):
            split = [o for o in (x, *others) if isinstance(o, SpatialTensor)]
            raise refusal(function, split, "only its input may be a tensor")
        try:
            expected = _meta_result(function, x.shape, x.dtype, args[1:], tuple(kwargs.items()))
        except TypeError:  # unhashable dims (a list), or an error of PyTorch
            expected = (
                meta_result(function, *args, **kwargs)
                if args
                else meta_result(function, x, **kwargs)
            )
        return _restore_shape(handler(function, x, *args[1:], **kwargs), expected)

    return call


@lru_cache(maxsize=4096, typed=True)
def _meta_result(
    function: Call, shape: torch.Size, dtype: torch.dtype, args: Any, kwargs: Any
) -> Any:
    """The cached result of `function` for a tensor of `shape` on the meta device, which is slow."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return meta_result(function, like, *args, **dict(kwargs))


def _restore_shape(result: Any, expected: Any) -> Any:
    """`result`, with reduced dims kept, in the shape of `expected`."""
    if isinstance(expected, Tensor):
        same = result.shape == expected.shape
        return result if same else result.reshape(expected.shape)
    shaped = [_restore_shape(value, like) for value, like in zip(result, expected, strict=True)]
    return type(expected)(shaped)
