"""Images turned round: flip, roll, rot90."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.layout import Bounds, Box
from spatialdl.spatial.reindex import DimMap, Segment, one_sample, reindex, split_dims
from spatialdl.spatial.span import without_data
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


def _numbers(values: tuple[Any, ...]) -> tuple[int, ...]:
    """PyTorch's `1, 2` or `(1, 2)`."""
    if len(values) == 1 and not isinstance(values[0], int):
        return tuple(values[0])
    return values


def _is_split(x: SpatialTensor, dim: int) -> bool:
    return x.spatial_dims.holds(dim, x.dim())


@register_op(torch.flip, Tensor.flip, split=("input",))
def flip(input: SpatialTensor, *dims: Any, **named: Any) -> SpatialTensor:
    wanted = _numbers(dims or (named["dims"],))
    torch.flip(without_data(input), wanted)
    others = [dim for dim in wanted if not _is_split(input, dim)]
    if others or not wanted:
        tile = to_tile(input).flip(others)
        flipped = from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)
    else:
        flipped = input
    turned = {dim % input.dim() - input.dim() for dim in wanted if _is_split(input, dim)}
    if not turned:
        return flipped
    row_dim, col_dim = split_dims(torch.flip, input)
    layout = input.spatial_layout
    rows = _backwards(layout.rows) if row_dim in turned else DimMap.identity(layout.rows)
    cols = _backwards(layout.cols) if col_dim in turned else DimMap.identity(layout.cols)
    return reindex(torch.flip, flipped, rows, cols)


def _backwards(bounds: Bounds) -> DimMap:
    return DimMap((Segment(bounds[-1], bounds[-1] - 1, -1),), bounds)


@register_op(torch.fliplr, Tensor.fliplr, split=("input",))
def fliplr(input: SpatialTensor) -> SpatialTensor:
    torch.fliplr(without_data(input))
    return flip(input, 1)


@register_op(torch.flipud, Tensor.flipud, split=("input",))
def flipud(input: SpatialTensor) -> SpatialTensor:
    torch.flipud(without_data(input))
    return flip(input, 0)


@register_op(torch.roll, Tensor.roll, split=("input",))
def roll(input: SpatialTensor, shifts: Any, dims: Any = None) -> Tensor:
    torch.roll(without_data(input), shifts, () if dims is None else dims)
    if dims is None or dims == ():
        raise refusal(torch.roll, [input], "say along which dims")
    steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    others = [(s, d) for s, d in zip(steps, wanted, strict=True) if not _is_split(input, d)]
    rolled = input
    if others:
        tile = to_tile(input).roll(*zip(*others, strict=True))
        rolled = from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)
    if len(others) == len(wanted):
        return rolled
    row_dim, col_dim = split_dims(torch.roll, input)
    by_dim = dict.fromkeys((row_dim, col_dim), 0)
    for step, dim in zip(steps, wanted, strict=True):
        if _is_split(input, dim):
            by_dim[dim % input.dim() - input.dim()] += step
    rows = _rolled(input.spatial_layout.rows, by_dim[row_dim])
    cols = _rolled(input.spatial_layout.cols, by_dim[col_dim])
    result = reindex(torch.roll, rolled, rows, cols)
    return result.clone() if result is input else result


def _rolled(bounds: Bounds, shift: int) -> DimMap:
    size = bounds[-1]
    shift %= max(size, 1)
    if shift == 0:
        return DimMap.identity(bounds)
    return DimMap((Segment(shift, size - shift), Segment(size - shift, 0)), bounds)


@register_op(torch.rot90, Tensor.rot90, split=("input",))
def rot90(input: SpatialTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    torch.rot90(without_data(input), k, tuple(dims))
    first, second = (dim % input.dim() for dim in dims)
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return flip(input, (first, second))
    flipped = flip(input, second if turns == 1 else first)
    if _is_split(input, first) and _is_split(input, second):
        return _transposed(flipped)
    result: Tensor = flipped.transpose(first, second)
    return result


def _transposed(x: SpatialTensor) -> SpatialTensor:
    """Rows become columns: every rank's box goes to where the grid cuts the new image."""
    dims, layout = split_dims(torch.rot90, x), one_sample(x.spatial_layout)
    output = x.mesh.layout((1, layout.cols[-1], layout.rows[-1]))
    owned = tuple(Box(0, 1, b.col0, b.col1, b.row0, b.row1) for b in layout.boxes)
    plan = plan_for(owned, output.boxes, x.mesh.part)
    image = to_tile(x).movedim(dims, (-1, -2)).unsqueeze(0)
    moved = repartition(image, x.mesh.grid_comm, plan, name="rot90").squeeze(0)
    return from_tile(moved.movedim((-2, -1), dims), output, x.mesh, x.spatial_dims)
