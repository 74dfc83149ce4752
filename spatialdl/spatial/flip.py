"""Flips, rolls and rotations of images: flip, roll, rot90."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.parallel.layout import Bounds, Box
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.reindex import (
    DimMap,
    Segment,
    apart_dims,
    reindex,
)
from spatialdl.spatial.span import on_meta
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


def _numbers(values: tuple[Any, ...]) -> tuple[int, ...]:
    """The dims of PyTorch's `1, 2` or `(1, 2)`."""
    if len(values) == 1 and not isinstance(values[0], int):
        return tuple(values[0])
    return values


def _is_split(x: SpatialTensor, dim: int) -> bool:
    return x.spatial_dims.holds(dim, x.dim())


@register_op(torch.flip, Tensor.flip, split=("input",))
def flip(input: SpatialTensor, *dims: Any, **named: Any) -> SpatialTensor:
    wanted = _numbers(dims or (named["dims"],))
    on_meta(torch.flip, input, wanted)
    others = [dim for dim in wanted if not _is_split(input, dim)]
    if others or not wanted:
        tile = to_tile(input).flip(others)
        flipped = from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)
    else:
        flipped = input
    turned = {dim % input.dim() - input.dim() for dim in wanted if _is_split(input, dim)}
    if not turned:
        return flipped
    held = apart_dims(torch.flip, input)
    maps = tuple(
        _backwards(bounds) if dim in turned else DimMap.identity(bounds)
        for dim, bounds in zip(held, input.spatial_layout.cuts, strict=True)
    )
    return reindex(torch.flip, flipped, maps)


def _backwards(bounds: Bounds) -> DimMap:
    return DimMap((Segment(bounds[-1], bounds[-1] - 1, -1),), bounds)


@register_op(torch.fliplr, Tensor.fliplr, split=("input",))
def fliplr(input: SpatialTensor) -> SpatialTensor:
    on_meta(torch.fliplr, input)
    return flip(input, 1)


@register_op(torch.flipud, Tensor.flipud, split=("input",))
def flipud(input: SpatialTensor) -> SpatialTensor:
    on_meta(torch.flipud, input)
    return flip(input, 0)


@register_op(torch.roll, Tensor.roll, split=("input",))
def roll(input: SpatialTensor, shifts: Any, dims: Any = None) -> Tensor:
    on_meta(torch.roll, input, shifts, () if dims is None else dims)
    if dims is None or dims == ():
        raise refusal(torch.roll, [input], "pass dims")
    steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    others = [(s, d) for s, d in zip(steps, wanted, strict=True) if not _is_split(input, d)]
    rolled = input
    if others:
        tile = to_tile(input).roll(*zip(*others, strict=True))
        rolled = from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)
    if len(others) == len(wanted):
        return rolled
    by_dim = dict.fromkeys(apart_dims(torch.roll, input), 0)
    for step, dim in zip(steps, wanted, strict=True):
        if _is_split(input, dim):
            by_dim[dim % input.dim() - input.dim()] += step
    maps = tuple(map(_rolled, input.spatial_layout.cuts, by_dim.values()))
    result = reindex(torch.roll, rolled, maps)
    return result.clone() if result is input else result


def _rolled(bounds: Bounds, shift: int) -> DimMap:
    size = bounds[-1]
    shift %= max(size, 1)
    if shift == 0:
        return DimMap.identity(bounds)
    return DimMap((Segment(shift, size - shift), Segment(size - shift, 0)), bounds)


@register_op(torch.rot90, Tensor.rot90, split=("input",))
def rot90(input: SpatialTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    on_meta(torch.rot90, input, k, tuple(dims))
    first, second = (dim % input.dim() for dim in dims)
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return flip(input, (first, second))
    flipped = flip(input, second if turns == 1 else first)
    if _is_split(input, first) and _is_split(input, second):
        return _transposed(flipped, first - input.dim(), second - input.dim())
    result: Tensor = flipped.transpose(first, second)
    return result


def _transposed(x: SpatialTensor, first: int, second: int) -> SpatialTensor:
    """Swap two split dims: boxes are moved to the grid's layout of the new image."""
    dims, layout = apart_dims(torch.rot90, x), x.spatial_layout.of_samples(1)
    order = list(range(1 + len(dims)))
    one, other = 1 + dims.index(first), 1 + dims.index(second)
    order[one], order[other] = other, one
    output = x.mesh.layout(1, [layout.size[number - 1] for number in order[1:]])
    owned = tuple(Box(box[number] for number in order) for box in layout.boxes)
    plan = plan_for(owned, output.boxes, x.mesh.part)
    last = image_dims(len(dims)).at
    turned = [last[number - 1] for number in order[1:]]
    image = to_tile(x).movedim(dims, turned).unsqueeze(0)
    moved = repartition(image, x.mesh.grid_comm, plan, name="rot90").squeeze(0)
    return from_tile(moved.movedim(last, dims), output, x.mesh, x.spatial_dims)
