"""Changes of dims: view, reshape, flatten, permute, squeeze, expand, repeat.

Every rank applies the operation to its tile, and `dims` tracks the spatial dims. If a view cuts
them into windows, (N, H/8, 8, W/8, 8, C), the image is first repartitioned so that every window
lies inside a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from spatialdl.layout.layout import Bounds, Layout
from spatialdl.spatial.dims import SpatialDims, View, regroup
from spatialdl.spatial.random.composite import getter, numbers_of
from spatialdl.spatial.reorder import reorder
from spatialdl.spatial.sharing import share
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, on_layout, to_tile

Sizes = Sequence[int]


@lru_cache(maxsize=4096)
def _round_bounds(bounds: Bounds, step: int) -> Bounds:
    """`bounds` rounded to multiples of `step`, which divides the size."""
    return tuple((2 * bound + step) // (2 * step) * step for bound in bounds)


def view_as_shape(func: Any, x: SpatialTensor, shape: tuple[int, ...]) -> Tensor:
    """`x` viewed as the global `shape`.

    An image of one pixel that loses spatial dims becomes a plain tensor.

    Raises:
        UnsupportedSpatialOp: the view mixes spatial dims with other dims.
    """
    size = x.spatial_layout.size
    view = regroup(tuple(x.shape), shape, x.spatial_dims, size)
    if prod(size) == 1 and (view is None or _loses_dims(view.dims)):
        return x.full_tensor().reshape(shape)
    if view is None:
        moved = reorder(x, shape)
        if moved is not None:
            return moved
        raise refusal(
            func,
            [x],
            f"a view of {tuple(x.shape)} as {shape} mixes split dims with other dims; keep the "
            "split dims next to each other, or gather the image: parallel.gather_before=NAME of "
            "the next module, or spatialdl.gather_before(model, NAME)",
        )
    old, new = _layouts(x.spatial_layout, view)
    moved_x = on_layout(x, old)
    local = view.dims.of_part(x.mesh.part).sizes(shape, x.mesh.own_box(new).shape[1:])
    result = from_tile(to_tile(moved_x).reshape(local), new, x.mesh, view.dims)
    if moved_x is not x:
        share(x, result, moved=True)
    return result


def _loses_dims(dims: SpatialDims) -> bool:
    """Whether spatial dims share a dim, or the last one shares its dim with other dims."""
    return len(set(dims.at)) < len(dims.at) or dims.outer[-1] > 1


@lru_cache(maxsize=4096)
def _layouts(layout: Layout, view: View) -> tuple[Layout, Layout]:
    """The input layout that a view needs, and the layout of its result."""
    old = tuple(map(_round_bounds, layout.cuts, view.steps))
    new = tuple(
        tuple(bound // step * factor for bound in bounds)
        for bounds, step, factor in zip(old, view.steps, view.factors, strict=True)
    )
    return Layout(layout.batch, old), Layout(layout.batch, new)


def _infer_size(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with -1 replaced by the inferred size."""
    if shape.count(-1) != 1:
        return shape
    known = prod(size for size in shape if size != -1)
    return tuple(x.numel() // max(known, 1) if size == -1 else size for size in shape)


@register_op(Tensor.view, split=("input",), prefix=True)
def view(input: SpatialTensor, *shape: Any, dtype: Any = None) -> Tensor:
    if dtype is not None or (shape and isinstance(shape[0], torch.dtype)):
        raise refusal(Tensor.view, [input], "viewing the bytes as another dtype is not supported")
    return reshape(input, *shape)


@register_op(Tensor.reshape, torch.reshape, split=("input",), prefix=True)
def reshape(input: SpatialTensor, *sizes: Any) -> Tensor:
    sizes = _infer_size(input, tuple(numbers_of(sizes)))
    return view_as_shape(torch.reshape, input, sizes)


@register_op(Tensor.view_as, Tensor.reshape_as, split=("input", "other"), prefix=True)
def view_as(input: Tensor, other: Tensor) -> Tensor:
    return input.reshape(tuple(other.shape))


@register_op(torch.flatten, Tensor.flatten, split=("input",), prefix=True)
def flatten(input: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    first, last = start_dim % input.dim(), end_dim % input.dim()
    shape = tuple(input.shape)
    merged = prod(shape[first : last + 1])
    return view_as_shape(torch.flatten, input, (*shape[:first], merged, *shape[last + 1 :]))


@register_op(torch.ravel, Tensor.ravel, split=("input",), prefix=True)
def ravel(input: SpatialTensor) -> Tensor:
    return view_as_shape(torch.ravel, input, (input.numel(),))


@register_op(torch.unflatten, Tensor.unflatten, split=("input",), prefix=True)
def unflatten(input: SpatialTensor, dim: int, sizes: Sizes) -> Tensor:
    where = dim % input.dim()
    shape = tuple(input.shape)
    known = prod(size for size in sizes if size != -1)
    parts = [shape[where] // max(known, 1) if size == -1 else size for size in sizes]
    new_shape = (*shape[:where], *parts, *shape[where + 1 :])
    return view_as_shape(torch.unflatten, input, new_shape)


# --- the order of the dims


def permute_dims(x: SpatialTensor, order: Sizes) -> SpatialTensor:
    """`x` with its dims permuted: dim i of the result is dim ``order[i]`` of `x`."""
    count = x.dim()
    order = [dim % count for dim in order]
    if sorted(order) != list(range(count)):
        raise RuntimeError(f"permute: {list(order)} is not a permutation of {count} dims")
    moved = x.spatial_dims.map_dims(lambda dim: order.index(dim + count) - count)
    return from_tile(to_tile(x).permute(order), x.spatial_layout, x.mesh, moved)


@register_op(Tensor.permute, torch.permute, split=("input",), prefix=True)
def permute(input: SpatialTensor, *order: Any, dims: Any = ()) -> Tensor:
    return permute_dims(input, numbers_of(order or (dims,)))


@register_op(
    torch.transpose,
    Tensor.transpose,
    torch.swapaxes,
    Tensor.swapaxes,
    torch.swapdims,
    Tensor.swapdims,
    split=("input",),
    prefix=True,
)
def transpose(input: SpatialTensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(input.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute_dims(input, order)


@register_op(
    torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis, split=("input",), prefix=True
)
def movedim(input: SpatialTensor, source: Any, destination: Any) -> Tensor:
    order = torch.movedim(
        torch.empty(tuple(range(1, input.dim() + 1)), device="meta"), source, destination
    ).shape
    return permute_dims(input, [size - 1 for size in order])


@register_op(getter("mT"), split=("input",), prefix=True)
def matrix_transpose(input: SpatialTensor) -> Tensor:
    return transpose(input, -2, -1)


@register_op(torch.adjoint, Tensor.adjoint, getter("mH"), split=("input",), prefix=True)
def adjoint(input: SpatialTensor) -> Tensor:
    flipped = transpose(input, -2, -1)
    return flipped.conj() if input.is_complex() else flipped


@register_op(torch.t, Tensor.t, split=("input",), prefix=True)
def t(input: SpatialTensor) -> Tensor:
    return permute_dims(input, tuple(reversed(range(input.dim()))))


@register_op(getter("T"), getter("H"), split=("input",), prefix=True)
def reversed_dims(input: SpatialTensor) -> Tensor:
    if input.is_complex():
        raise refusal(Tensor.T, [input], "use permute() and conj()")
    return permute_dims(input, tuple(reversed(range(input.dim()))))


# --- added, removed and expanded dims


def _without(x: SpatialTensor, gone: set[int]) -> Tensor:
    """`x` without the dims `gone`, of size 1."""
    dims, count = x.spatial_dims, x.dim()
    if not gone:
        return x.view(tuple(x.shape))
    if any(dims.holds(dim, count) for dim in gone):  # one row or one column: small
        return x.full_tensor().squeeze(tuple(gone))

    def shift(old: int) -> int:  # removed dims after it no longer count
        return old + sum(1 for dim in gone if dim > old + count)

    shape = [size for dim, size in enumerate(x._tile.shape) if dim not in gone]
    return from_tile(to_tile(x).reshape(shape), x.spatial_layout, x.mesh, dims.map_dims(shift))


@register_op(torch.squeeze, Tensor.squeeze, split=("input",), prefix=True)
def squeeze(input: SpatialTensor, dim: Any = None) -> Tensor:
    count = input.dim()
    candidates = range(count) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d % count for d in candidates if input.shape[d] == 1}
    return _without(input, gone)


@register_op(torch.unsqueeze, Tensor.unsqueeze, split=("input",), prefix=True)
def unsqueeze(input: SpatialTensor, dim: int) -> Tensor:
    count = input.dim()
    where = dim % (count + 1)
    tile = to_tile(input).unsqueeze(where)
    moved = input.spatial_dims.map_dims(lambda old: old - 1 if where > old + count else old)
    return from_tile(tile, input.spatial_layout, input.mesh, moved)


def _local_sizes(func: Any, x: SpatialTensor, sizes: Sizes) -> list[int]:
    """The sizes to which the tile is expanded; spatial dims keep theirs."""
    local = list(sizes)
    for dim in x.spatial_dims.at:
        if local[dim] not in (-1, x.shape[dim]):
            raise refusal(func, [x], f"split dims cannot be expanded to {tuple(sizes)}")
        local[dim] = -1
    return local


@register_op(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, split=("input",), prefix=True)
def expand(input: SpatialTensor, *sizes: Any, size: Any = (), implicit: bool = False) -> Tensor:
    tile = to_tile(input).expand(_local_sizes(Tensor.expand, input, numbers_of(sizes or (size,))))
    return from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)


@register_op(Tensor.expand_as, split=("input", "other"), prefix=True)
def expand_as(input: Tensor, other: Tensor) -> Tensor:
    return input.expand(tuple(other.shape))


def _repeat_dims(func: Any, x: SpatialTensor, times: Sizes) -> Tensor:
    if any(times[dim] != 1 for dim in x.spatial_dims.at):
        raise refusal(func, [x], f"split dims cannot be repeated, got {tuple(times)}")
    return from_tile(to_tile(x).repeat(*times), x.spatial_layout, x.mesh, x.spatial_dims)


@register_op(Tensor.repeat, split=("input",), prefix=True)
def repeat(input: SpatialTensor, *repeats: Any) -> Tensor:
    return _repeat_dims(Tensor.repeat, input, numbers_of(repeats))


@register_op(torch.tile, Tensor.tile, split=("input",), prefix=True)
def tile(input: SpatialTensor, *dims: Any) -> Tensor:
    times = numbers_of(dims)
    return _repeat_dims(torch.tile, input, (1,) * (input.dim() - len(times)) + tuple(times))


@register_op(torch.repeat_interleave, Tensor.repeat_interleave, split=("input",), prefix=True)
def repeat_interleave(
    input: SpatialTensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if dim is None or input.spatial_dims.holds(dim, input.dim()):
        raise refusal(
            torch.repeat_interleave,
            [input],
            "pass a dim that is not split, or use F.interpolate(mode='nearest')",
        )
    repeated = to_tile(input).repeat_interleave(repeats, dim, output_size=output_size)
    return from_tile(repeated, input.spatial_layout, input.mesh, input.spatial_dims)
