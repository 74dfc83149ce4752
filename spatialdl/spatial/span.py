"""Which dims a reduction of a split tensor runs over, and what ranks must tell each other for it.

A reduction over rows or columns gives a plain tensor, the same on every rank. Each rank reduces
its tile, puts the result where it belongs in the full size (a sum over the rows alone still has
all columns), and the ranks combine what they have. Everything here keeps reduced dims as dims of
size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import differentiable_sum, max_over_ranks, sum_over_ranks
from spatialdl.parallel.layout import Box, Layout
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op


@dataclass(frozen=True)
class ReductionSpan:
    """The dims of a reduction, and where the tile lies in the dims that are kept.

    Attributes:
        dims: the reduced dims, not negative.
        count: how many elements of the whole tensor become one.
        crosses: whether spatial dims are among them, so that ranks must talk.
        kept: the split dims that are kept, each with the global positions of the tile in it and
            its global size; empty if nothing crosses.
        comm: the ranks.
    """

    dims: tuple[int, ...]
    count: int
    crosses: bool
    kept: tuple[tuple[int, Tensor, int], ...]
    comm: Communicator

    def placed(self, part: Tensor, fill: float = 0.0) -> Tensor:
        """`part`, of this tile, in the full size of the dims that are kept; `fill` elsewhere."""
        for dim, positions, size in self.kept:
            shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
            full = part.new_full(shape, fill)
            part = full.index_copy(dim, on(positions, part.device), part)
        return part

    def own(self, whole: Tensor) -> Tensor:
        """The part of `whole` (of the full size) that belongs to this tile."""
        for dim, positions, _ in self.kept:
            whole = whole.index_select(dim, on(positions, whole.device))
        return whole

    def sum(self, part: Tensor, name: str) -> Tensor:
        """The sum over all ranks of their parts, in the full size; differentiable."""
        if not self.crosses:
            return part
        return differentiable_sum(self.comm, self.placed(part), name)

    def own_sum(self, part: Tensor, name: str) -> Tensor:
        """This tile's part of the sum over all ranks; autograd does not see it."""
        if not self.crosses:
            return part
        return self.own(sum_over_ranks(self.comm, self.placed(part), name))

    def max(self, part: Tensor, lowest: float, name: str) -> Tensor:
        """The largest over all ranks, in the full size; autograd does not see it."""
        if not self.crosses:
            return part
        return max_over_ranks(self.comm, self.placed(part, lowest), name)


def names_no_dims(dim: Any) -> bool:
    """Whether `dim` is an empty tuple or list, which most reductions take for all dims."""
    return isinstance(dim, (tuple, list)) and len(dim) == 0


def dims_of(x: Tensor, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction means, not negative; None and () mean all."""
    if dim is None or names_no_dims(dim):
        return tuple(range(x.dim()))
    chosen = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(d % x.dim() for d in chosen))


def split_dims(x: SpatialTensor) -> tuple[int, ...]:
    """The dims that hold spatial dims, not negative: fewer than those where some are merged."""
    return tuple(sorted({dim % x.dim() for dim in x.spatial_dims.at}))


def span_of(x: SpatialTensor, dim: Any) -> ReductionSpan:
    """The span of a reduction of `x` over `dim` (a number, several, or None for all)."""
    dims, split = dims_of(x, dim), split_dims(x)
    crosses = bool(set(dims) & set(split))
    kept = tuple((d, positions(x, d), x.shape[d]) for d in split if crosses and d not in dims)
    return ReductionSpan(dims, prod(x.shape[d] for d in dims), crosses, kept, x.mesh.grid_comm)


def positions(x: SpatialTensor, dim: int) -> Tensor:
    """Where in the global dim `dim` the elements of this rank's tile are; (tile's size,) int64."""
    number = dim % x.dim()
    if number not in split_dims(x):
        return torch.arange(x.shape[number])
    return positions_of(x, number - x.dim(), x.mesh.part)


def positions_of(x: SpatialTensor, dim: int, part: int) -> Tensor:
    """The same for the tile of any part, in a dim (negative) that holds spatial dims."""
    return positions_in(x.spatial_layout, x.spatial_dims, x.shape[dim], dim, part)


def positions_in(layout: Layout, dims: SpatialDims, size: int, dim: int, part: int) -> Tensor:
    """The same of any tensor, in a dim (negative) of this global size."""
    if dim not in dims.at:
        return torch.arange(size)
    own = _split_positions(layout, layout.boxes[part], dims.of_pixels, dim)
    return _with_tokens(own, dims, size, part == 0) if dims.beside else own


def positions_on(x: SpatialTensor, dim: int) -> Tensor:
    """The same on the device of the tile."""
    number = dim % x.dim()
    if number not in split_dims(x):
        return torch.arange(x.shape[number], device=x.device)
    return on(positions(x, dim), x.device)


@lru_cache(maxsize=4096)
def _split_positions(layout: Layout, box: Box, dims: SpatialDims, dim: int) -> Tensor:
    found = torch.zeros(1, dtype=torch.int64)
    for at, outer, size, (start, stop) in zip(
        dims.at, dims.outer, layout.size, box.spatial, strict=True
    ):
        if at == dim:
            blocks = torch.arange(outer)[:, None] * size + torch.arange(start, stop)
            found = (found[:, None] * (outer * size) + blocks.flatten()).flatten()
    return found


@lru_cache(maxsize=4096)
def _with_tokens(pixels: Tensor, dims: SpatialDims, size: int, is_first: bool) -> Tensor:
    """The positions of pixels in a dim of `size` that also has entries that belong to none."""
    pixels = pixels + dims.prefix
    if not is_first:
        return pixels
    return torch.cat([torch.arange(dims.prefix), pixels, torch.arange(size - dims.suffix, size)])


def without_dims(x: SpatialTensor, tile: Tensor, removed: tuple[int, ...]) -> SpatialTensor:
    """`tile` as the split tensor that `x` becomes when dims that are not split are removed."""
    if not removed:
        return from_tile(tile, x.spatial_layout, x.mesh, x.spatial_dims)
    dims = x.spatial_dims.moved(lambda old: old + sum(d > old + x.dim() for d in removed))
    return from_tile(tile, x.spatial_layout, x.mesh, dims)


# --- how reductions are registered

Call = Callable[..., Any]
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input"}
_WRONG_ON_META = ("nansum", "nanmean")
"""These take no dims for all dims, but not on PyTorch's meta device, where shapes are asked for."""


def reduction(*functions: Call) -> Callable[[Call], Call]:
    """Register a reduction under several names.

    The decorated handler takes the function called and its arguments, and gives the result with
    or without the reduced dims. What PyTorch itself refuses (a dim out of range, a type) is
    refused alike on all ranks, because the call is tried without data first; that also tells the
    shape of the result.
    """

    def register(handler: Call) -> Call:
        for function in functions:
            register_op(function, prefix=True)(checked(function, handler))
        return handler

    return register


def checked(function: Call, handler: Call) -> Call:
    """The handler of a reduction as `reduction` registers it."""

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
            expected = _expected(function, x.shape, x.dtype, args[1:], tuple(kwargs.items()))
        except TypeError:  # dims in a list, or what PyTorch refuses
            expected = asked(function, *args, **kwargs) if args else asked(function, x, **kwargs)
        return _shaped(handler(function, x, *args[1:], **kwargs), expected)

    return call


@lru_cache(maxsize=4096, typed=True)
def _expected(function: Call, shape: torch.Size, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """What `function` gives for a tensor of `shape`, on the meta device, where this is slow."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return _unseen(lambda: function(like, *args, **dict(kwargs)))


def asked(function: Call, *args: Any, **kwargs: Any) -> Any:
    """What `function` gives for plain, whole tensors without data; or PyTorch's own error.

    The planner, which counts the tensors that a rank makes, does not see these.
    """
    return _unseen(lambda: function(*map(_without_data, args), **kwargs))


def _unseen(call: Callable[[], Any]) -> Any:
    if torch._C._len_torch_dispatch_stack() == 0:
        return call()
    with _disable_current_modes():
        return call()


def _without_data(value: Any) -> Any:
    """`value` with each tensor in it replaced by a plain, whole one on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [_without_data(v) for v in value]
    return value


def _shaped(result: Any, expected: Any) -> Any:
    """`result`, of which the ranks have kept all dims, in the shape that is expected."""
    if isinstance(expected, Tensor):
        same = result.shape == expected.shape
        return result if same else result.reshape(expected.shape)
    shaped = [_shaped(value, like) for value, like in zip(result, expected, strict=True)]
    return type(expected)(shaped)
