"""Padding and cropping; flips, rolls and rotations; pixel and channel shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.layout.layout import Bounds, Box, Layout
from spatialdl.spatial.autocast import padded_as
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.random.composite import numbers_of
from spatialdl.spatial.reindex import (
    DimMap,
    Segment,
    reindex,
    separate_dims_of,
    take,
)
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, on_layout, to_tile
from spatialdl.torch_internals import nn_functions


@register_op(F.pad, nn_functions.pad, split=("input",))
def pad_image(
    input: SpatialTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    pads = tuple(int(p) for p in pad)
    input = padded_as(input, mode)  # type: ignore[assignment]
    _check(tuple(input.shape), input.dtype, pads, mode, value)
    if not any(pads):
        return input.clone()
    by_dim = {-1 - k: (pads[2 * k], pads[2 * k + 1]) for k in range(len(pads) // 2)}
    held = input.spatial_dims.at
    if not any(any(by_dim.get(dim, ())) for dim in held):
        return _pad_other_dims(input, by_dim, mode, value)
    others = {dim: p for dim, p in by_dim.items() if dim not in held and any(p)}
    if others:
        input = _pad_other_dims(input, others, mode, value)
    if len(held) > 1 and set(held) == {held[0]} and mode == "constant":
        return _pad_tokens(input, *by_dim[held[0]], value)
    dims = separate_dims_of(F.pad, input, {dim for dim in held if any(by_dim.get(dim, ()))})
    maps = tuple(
        _pad_map(input, bounds, by_dim.get(dim, (0, 0)), mode)
        for dim, bounds in zip(dims, input.spatial_layout.cuts, strict=True)
    )
    return reindex(F.pad, input, maps, 0.0 if value is None else value)


@register_op(torch.constant_pad_nd, split=("input",))
def constant_pad_nd(input: SpatialTensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return pad_image(input, pad, "constant", value)


@lru_cache(maxsize=4096)
def _check(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    pads: tuple[int, ...],
    mode: str,
    value: float | None,
) -> None:
    """Raise PyTorch's errors for the whole image."""
    F.pad(torch.empty(shape, dtype=dtype, device="meta"), pads, mode, value)


def _pad_map(x: SpatialTensor, bounds: Bounds, pads: tuple[int, int], mode: str) -> DimMap:
    if not any(pads):
        return DimMap.identity(bounds)
    return DimMap.of(_segments(x, bounds[-1], *pads, mode), bounds)


def _segments(x: SpatialTensor, size: int, before: int, after: int, mode: str) -> list[Segment]:
    """The segments of the padded dim of `size` inputs; negative pads crop."""
    left, right = max(before, 0), max(after, 0)
    first, count = max(-before, 0), size + min(before, 0) + min(after, 0)
    if mode == "constant":
        return [Segment(size + before + after, -before)]
    if mode in ("replicate", "reflect"):
        return _mirror_segments(size, before, after, mode)
    if left > count or right > count:
        raise refusal(F.pad, [x], f"a circular pad of ({before}, {after}) reads cropped pixels")
    return [
        Segment(left, first + count - left),
        Segment(count, first),
        Segment(right, first),
    ]


def _mirror_segments(size: int, before: int, after: int, mode: str) -> list[Segment]:
    """The segments of mode reflect or replicate; a crop may remove part of the pad.

    Output j reads input j - before, reflected or replicated at the ends.
    """
    total = size + before + after
    left = min(max(before, 0), total)
    first = left - before
    count = max(0, min(size - first, total - left))
    right = total - left - count
    core = Segment(count, min(first, size - 1))
    if mode == "replicate":
        return [Segment(left, 0, 0), core, Segment(right, size - 1, 0)]
    start = 2 * (size - 1) - (left + count - before)
    return [Segment(left, max(before, 0), -1), core, Segment(right, max(start, 0), -1)]


def _pad_tokens(x: SpatialTensor, before: int, after: int, value: float | None) -> Tensor:
    """Pad tokens by entries before and after them that belong to no pixel, as class tokens."""
    dim = x.spatial_dims.at[0]
    if min(before, after) < 0:
        raise refusal(F.pad, [x], "tokens of an image can be padded, not cropped")

    def fill_tokens(count: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = count
        return torch.full(shape, value or 0, dtype=x.dtype, device=x.device)

    return torch.cat([fill_tokens(before), x, fill_tokens(after)], dim)


def _pad_other_dims(
    x: SpatialTensor, pads: dict[int, tuple[int, int]], mode: str, value: float | None
) -> SpatialTensor:
    """Pad dims that are not split; local."""
    tile = to_tile(x)
    for dim, (before, after) in pads.items():
        if mode == "constant":
            tile = F.pad(tile, (0, 0) * (-dim - 1) + (before, after), mode, value)
        else:
            tile = take(tile, _segments(x, x.shape[dim], before, after, mode), dim)
    return from_tile(tile, x.spatial_layout, x.mesh, x.spatial_dims)


# --- flips, rolls and rotations


def _is_split(x: SpatialTensor, dim: int) -> bool:
    return x.spatial_dims.holds(dim, x.dim())


@register_op(torch.flip, Tensor.flip, split=("input",))
def flip(input: SpatialTensor, *dims: Any) -> SpatialTensor:
    wanted = tuple(numbers_of(dims))
    others = [dim for dim in wanted if not _is_split(input, dim)]
    if others or not wanted:
        tile = to_tile(input).flip(others)
        flipped = from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)
    else:
        flipped = input
    turned = {dim % input.dim() - input.dim() for dim in wanted if _is_split(input, dim)}
    if not turned:
        return flipped
    held = separate_dims_of(torch.flip, input)
    maps = tuple(
        _flip_map(bounds) if dim in turned else DimMap.identity(bounds)
        for dim, bounds in zip(held, input.spatial_layout.cuts, strict=True)
    )
    return reindex(torch.flip, flipped, maps)


def _flip_map(bounds: Bounds) -> DimMap:
    return DimMap((Segment(bounds[-1], bounds[-1] - 1, -1),), bounds)


@register_op(torch.fliplr, Tensor.fliplr, split=("input",))
def fliplr(input: SpatialTensor) -> SpatialTensor:
    return flip(input, 1)


@register_op(torch.flipud, Tensor.flipud, split=("input",))
def flipud(input: SpatialTensor) -> SpatialTensor:
    return flip(input, 0)


@register_op(torch.roll, Tensor.roll, split=("input",))
def roll(input: SpatialTensor, shifts: Any, dims: Any = None) -> Tensor:
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
    by_dim = dict.fromkeys(separate_dims_of(torch.roll, input), 0)
    for step, dim in zip(steps, wanted, strict=True):
        if _is_split(input, dim):
            by_dim[dim % input.dim() - input.dim()] += step
    maps = tuple(map(_roll_map, input.spatial_layout.cuts, by_dim.values()))
    result = reindex(torch.roll, rolled, maps)
    return result.clone() if result is input else result


def _roll_map(bounds: Bounds, shift: int) -> DimMap:
    size = bounds[-1]
    shift %= max(size, 1)
    if shift == 0:
        return DimMap.identity(bounds)
    return DimMap((Segment(shift, size - shift), Segment(size - shift, 0)), bounds)


@register_op(torch.rot90, Tensor.rot90, split=("input",))
def rot90(input: SpatialTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = (dim % input.dim() for dim in dims)
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return flip(input, (first, second))
    flipped = flip(input, second if turns == 1 else first)
    if _is_split(input, first) and _is_split(input, second):
        return _swap_split_dims(flipped, first - input.dim(), second - input.dim())
    result: Tensor = flipped.transpose(first, second)
    return result


def _swap_split_dims(x: SpatialTensor, first: int, second: int) -> SpatialTensor:
    """Swap two split dims: boxes are moved to the grid's layout of the new image."""
    dims, layout = separate_dims_of(torch.rot90, x), x.spatial_layout.of_samples(1)
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


# --- shuffles


def _check_image(function: object, x: SpatialTensor) -> None:
    if x.spatial_dims != image_dims(2) or x.dim() < 3:
        raise refusal(function, [x], "it takes (..., C, H, W), with rows and columns last")


@register_op(F.pixel_shuffle, torch.pixel_shuffle, split=("input",))
def pixel_shuffle(input: SpatialTensor, upscale_factor: int) -> Tensor:
    """Shi et al. (2016): C*r*r channels of one pixel become r*r pixels of C channels; local."""
    _check_image(torch.pixel_shuffle, input)
    layout = input.spatial_layout
    output = _times(layout, upscale_factor)
    tile = to_tile(input)
    if tile.numel():
        tile = torch.pixel_shuffle(tile, upscale_factor)
    else:  # as in `pixel_unshuffle`, its backward
        *others, channels, height, width = tile.shape
        sizes = height * upscale_factor, width * upscale_factor
        tile = tile.reshape(*others, channels // upscale_factor**2, *sizes)
    return from_tile(tile, output, input.mesh)


def _times(layout: Layout, factor: int) -> Layout:
    return Layout((0, 1), tuple(tuple(b * factor for b in bounds) for bounds in layout.cuts))


@register_op(F.pixel_unshuffle, torch.pixel_unshuffle, split=("input",))
def pixel_unshuffle(input: SpatialTensor, downscale_factor: int) -> Tensor:
    """The inverse of `pixel_shuffle`; squares cut by the layout are first moved to one rank."""
    _check_image(torch.pixel_unshuffle, input)
    output = _unshuffled(input.spatial_layout, downscale_factor)
    tile = to_tile(on_layout(input, _times(output, downscale_factor)))
    *others, channels, height, width = tile.shape
    sizes = height // downscale_factor, width // downscale_factor
    if tile.numel():
        tile = torch.pixel_unshuffle(tile, downscale_factor)
    else:  # PyTorch computes wrong channels for tensors without pixels
        tile = tile.reshape(*others, channels * downscale_factor**2, *sizes)
    return from_tile(tile, output, input.mesh)


@lru_cache(maxsize=4096)
def _unshuffled(layout: Layout, factor: int) -> Layout:
    return layout.strided((factor, factor), [pixels // factor for pixels in layout.size])


@register_op(F.channel_shuffle, torch.channel_shuffle, split=("input",))
def channel_shuffle(input: SpatialTensor, groups: int) -> Tensor:
    """Zhang et al. (2018), ShuffleNet; local."""
    if input.spatial_dims.holds(1, input.dim()):
        raise refusal(torch.channel_shuffle, [input], "permute it so that dim 1 holds the channels")
    tile = to_tile(input)
    shuffled = tile.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
    return from_tile(shuffled, input.spatial_layout, input.mesh, input.spatial_dims)
