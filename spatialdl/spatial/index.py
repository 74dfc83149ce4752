"""Indexing and slicing: a repartition along spatial dims, local along all other dims.

One row of an image, or one slice of a volume, is a plain tensor, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.layout.layout import Bounds, Box, Layout
from spatialdl.spatial.dims import SpatialDims, gather_tokens, image_dims
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.operands import lift
from spatialdl.spatial.picking import blocks, pick
from spatialdl.spatial.reindex import DimMap, Segment, reindex, separate_dims_of
from spatialdl.spatial.table import is_spatial, refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile

Item = slice | int | Tensor | None
ALL = slice(None)
_PICKS = (
    "index tensors may select channels or samples, or pixels along split dims if no two of them "
    "share a dim of the result; for a mask use torch.where or masked_fill"
)
_WRITES = "an index tensor may not select pixels to write to; use torch.where or masked_fill"


class _Entry(NamedTuple):
    """One item of an index, and the dim (negative) of the tensor that it applies to."""

    item: Item
    dim: int


def _entries(x: SpatialTensor, index: Any) -> list[_Entry]:
    """The index expanded to one item per dim."""
    items = [_item(x, item) for item in (index if isinstance(index, tuple) else (index,))]
    used = sum(_width(item) for item in items)
    if ... not in [item for item in items if not isinstance(item, Tensor)]:
        items.append(...)
    entries, dim = [], -x.dim()
    for item in items:
        missing = max(x.dim() - used, 0)
        for one in [ALL] * missing if isinstance(item, EllipsisType) else [item]:
            entries.append(_Entry(one, dim))
            dim += _width(one)
    plain = tuple(ALL if isinstance(e.item, Tensor) else e.item for e in entries)
    meta_result(lambda whole: whole[plain], x)
    return entries


def _item(x: SpatialTensor, item: Any) -> Any:
    if item is None or isinstance(item, slice | EllipsisType):
        return item
    if isinstance(item, bool) or is_spatial(item):
        raise refusal(
            Tensor.__getitem__, [x], "a mask selects pixels; use torch.where or masked_fill"
        )
    if isinstance(item, Tensor) or hasattr(item, "__len__"):
        item = torch.as_tensor(item)
        if item.dim() > 0:
            return item
    return item.__index__()


def _width(item: Any) -> int:
    """The number of dims that an item indexes."""
    if item is None or isinstance(item, EllipsisType):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


def _result_dims(entries: Sequence[_Entry], dims: SpatialDims) -> SpatialDims:
    """The spatial dims of the result, in PyTorch's order of dims."""
    labels: list[int] = []  # the source dim of each dim of the result
    tensors: list[int] = []  # positions in `labels` of index tensors
    for item, dim in entries:
        if isinstance(item, Tensor):
            tensors.append(len(labels))
        if not isinstance(item, int):
            labels.append(0 if item is None or isinstance(item, Tensor) else dim)
    if tensors:
        shapes = [_shape_as_index(e.item) for e in entries if isinstance(e.item, Tensor)]
        count = len(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        together = tensors[-1] - tensors[0] == len(tensors) - 1
        first = tensors[0] if together else 0
        labels = [label for place, label in enumerate(labels) if place not in tensors]
        labels[first:first] = [0] * count
    return dims.map_dims(lambda dim: labels.index(dim) - len(labels))


def _shape_as_index(tensor: Tensor) -> tuple[int, ...]:
    if tensor.dtype in (torch.bool, torch.uint8):
        return (int(torch.count_nonzero(tensor)),)
    return tuple(tensor.shape)


def _is_all(item: Item, size: int) -> bool:
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def _on_split_dims(func: Any, x: SpatialTensor, entries: Sequence[_Entry]) -> tuple[Item, ...]:
    """The items of the spatial dims; `:` for dims that are merged or have a factor.

    Raises:
        UnsupportedSpatialOp: an item is a tensor, or a part of merged spatial dims.
    """
    dims = x.spatial_dims
    for item, dim in entries:
        covered = range(dim, dim + _width(item))
        if isinstance(item, Tensor) and set(dims.at) & set(covered):
            raise refusal(func, [x], _PICKS if func is Tensor.__getitem__ else _WRITES)
    items = {e.dim: e.item for e in entries if e.item is not None}
    touched = {dim for dim in dims.at if not _is_all(items[dim], x.shape[dim])}
    if touched:
        is_line = any(isinstance(items[dim], int) for dim in touched)
        separate_dims_of(Tensor.__getitem__, x, None if is_line else touched)
    return tuple(items[dim] if dim in touched else ALL for dim in dims.at)


def _slice_map(item: Item, bounds: Bounds) -> DimMap:
    if not isinstance(item, slice) or _is_all(item, bounds[-1]):
        return DimMap.identity(bounds)
    read = range(*item.indices(bounds[-1]))
    return DimMap.of([Segment(len(read), read.start, read.step)], bounds, read.step)


@register_op(Tensor.__getitem__, split=("input", "index"), prefix=True)
def getitem(input: SpatialTensor, index: Any) -> Tensor:
    if not isinstance(input, SpatialTensor):
        raise refusal(Tensor.__getitem__, [index], "a split tensor cannot be an index")
    entries = _entries(input, index)
    if all(e.item is not None and _is_all(e.item, input.shape[e.dim]) for e in entries):
        return input
    if input.spatial_dims.extra_tokens:
        tokens = _tokens(input, entries)
        if tokens is not None:
            return tokens
    if any(isinstance(e.item, Tensor) and e.dim in input.spatial_dims.at for e in entries):
        return _pick_pixels(input, entries)
    items = _on_split_dims(Tensor.__getitem__, input, entries)
    if input.mesh.grid_comm.size == 1:
        return _view_of_tile(input, entries, items)
    if any(isinstance(item, int) for item in items):
        return _line(input, entries, items)
    maps = tuple(map(_slice_map, items, input.spatial_layout.cuts))
    sliced = reindex(Tensor.__getitem__, input, maps, is_view=True)
    local = _local(entries, input.spatial_dims)
    if not all(isinstance(item, slice) and item == ALL for item in local):
        dims = _result_dims(entries, input.spatial_dims)
        sliced = from_tile(to_tile(sliced)[local], sliced.spatial_layout, sliced.mesh, dims)
    return sliced


def _pick_pixels(x: SpatialTensor, entries: Sequence[_Entry]) -> Tensor:
    """The pixels that index tensors select along split dims, one dim per tensor."""
    tensors = {e.dim: e.item for e in entries if isinstance(e.item, Tensor)}
    others = [e for e in entries if not isinstance(e.item, Tensor)]
    is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in tensors.values())
    is_beside = max(tensors) - min(tensors) == len(tensors) - 1
    own = blocks([index.shape for index in tensors.values()])
    if is_mask or not is_beside or own is None or not set(tensors) <= set(x.spatial_dims.at):
        raise refusal(Tensor.__getitem__, [x], _PICKS)
    if not all(e.item is not None and _is_all(e.item, x.shape[e.dim]) for e in others):
        raise refusal(Tensor.__getitem__, [x], f"{_PICKS}; slice other dims first")
    each = list(zip(tensors.items(), own, strict=True))
    for (dim, index), shape in reversed(each):  # last dim first, as dims shift
        after = sum(len(later) - 1 for (place, _), later in each if place > dim)
        x = pick(Tensor.__getitem__, x, dim - after, index.reshape(shape))
    return x


def _tokens(x: SpatialTensor, entries: Sequence[_Entry]) -> Tensor | None:
    """An index into a dim of pixels and extra tokens; None if it takes all of the dim.

    A result with all pixels is split, one without pixels is a plain tensor, the same on every rank.
    """
    dims, dim = x.spatial_dims, x.spatial_dims.at[0]
    item = next(e.item for e in entries if e.dim == dim and e.item is not None)
    size = x.shape[dim]
    if isinstance(item, Tensor) or _is_all(item, size):
        return None
    start, stop = _interval(item, size)
    pixels = size - dims.extra_tokens
    if stop <= dims.prefix or start >= dims.prefix + pixels or start >= stop:
        all_of_them = torch.cat(gather_tokens(to_tile(x), dims, x.mesh, "__getitem__"), dim)
        moved = _shift_item(item, size, pixels if start >= dims.prefix + pixels else 0)
        part = all_of_them[_with_item(entries, dim, moved)]
        return part if x.mesh.grid_comm.size == 1 else x._family.track_line(part)
    is_slice = isinstance(item, slice) and item.step in (None, 1)
    if not is_slice or start > dims.prefix or stop < dims.prefix + pixels:
        raise refusal(
            Tensor.__getitem__,
            [x],
            "an index must take all pixels of an image or none; slice off the extra tokens and "
            "view the rest as an image",
        )
    kept = dims._replace(prefix=dims.prefix - start, suffix=dims.suffix - (size - stop))
    tile = to_tile(x)
    if x.mesh.part == 0:
        tile = tile.narrow(dim, start, tile.shape[dim] - (dims.extra_tokens - kept.extra_tokens))
    sliced: Tensor = from_tile(tile, x.spatial_layout, x.mesh, kept)
    return sliced[_with_item(entries, dim, ALL)]


def _shift_item(item: Item, size: int, by: int) -> Item:
    """An item of a dim of `size`, shifted for a tensor without the first `by` entries."""
    if not isinstance(item, slice):
        return cast(int, item) % size - by
    read = range(*item.indices(size))
    return slice(read.start - by, read.stop - by, read.step) if read else slice(0, 0)


def _with_item(entries: Sequence[_Entry], dim: int, item: Item) -> tuple[Item, ...]:
    """An index with the item of one dim replaced."""
    return tuple(item if e.dim == dim and e.item is not None else e.item for e in entries)


def _view_of_tile(x: SpatialTensor, entries: Sequence[_Entry], items: tuple[Item, ...]) -> Tensor:
    """A view of the only tile."""
    part: Tensor = to_tile(x)[tuple(e.item for e in entries)]
    slices = [item for item in items if isinstance(item, slice)]
    if len(slices) < len(items):
        return part
    old = x.spatial_layout
    size = (len(range(n)[item]) for n, item in zip(old.size, slices, strict=True))
    layout = Layout(old.batch, tuple((0, extent) for extent in size))
    return from_tile(part, layout, x.mesh, _result_dims(entries, x.spatial_dims))


def _local(entries: Sequence[_Entry], dims: SpatialDims) -> tuple[Item, ...]:
    """The index for a tile whose spatial dims are already sliced."""
    return tuple(ALL if e.dim in dims.at and e.item is not None else e.item for e in entries)


def _line(x: SpatialTensor, entries: Sequence[_Entry], items: tuple[Item, ...]) -> Tensor:
    """A part of one row or column, on every rank."""
    layout, dims = x.spatial_layout.of_samples(1), x.spatial_dims.at
    needed = (Box(((0, 1), *map(_interval, items, layout.size))),) * len(layout.boxes)
    plan = plan_for(layout.boxes, needed, x.mesh.part)
    image = to_tile(x).movedim(dims, image_dims(len(dims)).at).unsqueeze(0)
    box = repartition(image, x.mesh.grid_comm, plan, name="__getitem__").squeeze(0)
    local = dict(zip(dims, map(_relative_item, items), strict=True))
    whole: Tensor = box.movedim(image_dims(len(dims)).at, dims)
    line = whole[tuple(local.get(e.dim, e.item) if e.item is not None else None for e in entries)]
    return x._family.track_line(line)


def _interval(item: Item, size: int) -> tuple[int, int]:
    if isinstance(item, int):
        return item % size, item % size + 1
    assert isinstance(item, slice)
    read = range(*item.indices(size))
    return (read[0], read[-1] + 1) if read else (0, 0)


def _relative_item(item: Item) -> Item:
    """The item relative to the interval that it reads."""
    return 0 if isinstance(item, int) else slice(None, None, item.step)  # type: ignore[union-attr]


@register_op(Tensor.__setitem__)
def setitem(input: Tensor, index: Any, value: Any) -> None:
    """Local for channels or samples of all pixels; `masked_fill_` for a mask."""
    if not isinstance(input, SpatialTensor):
        split = [x for x in (index, value) if isinstance(x, SpatialTensor)]
        raise refusal(
            Tensor.__setitem__, split, "a split tensor cannot be written to a whole one in place"
        )
    is_number = not isinstance(value, Tensor) or value.dim() == 0
    if isinstance(index, SpatialTensor) and index.dtype == torch.bool and is_number:
        input.masked_fill_(index, value)
        return
    entries = _entries(input, index)
    items = _on_split_dims(Tensor.__setitem__, input, entries)
    if not all(map(_is_all, items, input.spatial_layout.size)):
        raise refusal(
            Tensor.__setitem__,
            [input],
            "some of the rows or columns cannot be written; use torch.where, F.pad or torch.cat",
        )
    tile = to_tile(input).clone()
    local = _local(entries, input.spatial_dims)
    tile[local] = _tile_for(input, entries, tile[local], value)
    input.copy_(from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims))


def _tile_for(x: SpatialTensor, entries: Sequence[_Entry], target: Tensor, value: Any) -> Any:
    """This rank's tile of the value written to `target`, a part of the tile of `x`."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    dims = _result_dims(entries, x.spatial_dims)
    region = SpatialTensor(target.detach(), x.spatial_layout, x.mesh, dims)
    while value.dim() > region.dim() and value.shape[0] == 1:
        value = value[0]
    lifted = lift(Tensor.__setitem__, value, region, region.shape)
    return to_tile(lifted) if isinstance(lifted, SpatialTensor) else lifted
