"""Padding and cropping in all of PyTorch's modes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.parallel.layout import Bounds
from spatialdl.spatial.autocast import padded_as
from spatialdl.spatial.reindex import DimMap, Segment, apart_dims, reindex, take
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
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
    dims = apart_dims(F.pad, input, {dim for dim in held if any(by_dim.get(dim, ()))})
    maps = tuple(
        _padded(input, bounds, by_dim.get(dim, (0, 0)), mode)
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


def _padded(x: SpatialTensor, bounds: Bounds, pads: tuple[int, int], mode: str) -> DimMap:
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
        return _mirrored(size, before, after, mode)
    if left > count or right > count:
        raise refusal(F.pad, [x], f"a circular pad of ({before}, {after}) reads cropped pixels")
    return [
        Segment(left, first + count - left),
        Segment(count, first),
        Segment(right, first),
    ]


def _mirrored(size: int, before: int, after: int, mode: str) -> list[Segment]:
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

    def filled(count: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = count
        return torch.full(shape, value or 0, dtype=x.dtype, device=x.device)

    return torch.cat([filled(before), x, filled(after)], dim)


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
