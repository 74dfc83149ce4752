"""Thumbnails of volumes that are split over ranks: three slices through the middle.

A pixel of a thumbnail is the mean of the pixels below it, for masks the middle one. Both are the
same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, pairs
from spatialdl.layout.layout import even_bounds

Array = npt.NDArray[Any]

SIDE = 320
"""Maximum pixels of the longer side."""

COLOURS = np.array(
    [
        *((230, 60, 40), (40, 110, 220), (250, 190, 0), (20, 160, 90), (160, 60, 190)),
        *((0, 180, 200), (240, 110, 170), (120, 80, 40), (150, 200, 40), (90, 90, 160)),
    ],
    np.float64,
)
"""Colours of the classes from 1 on; class 0 has none."""

HEAT_COLOURS, HEAT_OPACITY = "turbo", 0.65
"""Colour map and opacity of heat maps over pictures."""

_OPACITY = 0.45


class Patch(NamedTuple):
    """Part of a thumbnail, with the position of its first pixel."""

    row: int
    col: int
    values: Array


class Section(NamedTuple):
    """One of three slices through the middle of a volume.

    Attributes:
        at: position along the spatial dim that is not shown, None along the others.
        size: rows and columns.
        small: rows and columns of the thumbnail.
    """

    at: tuple[int | None, ...]
    size: tuple[int, int]
    small: tuple[int, int]

    def within(self, box: Box) -> Box | None:
        """Shown part of a box; None if there is none."""
        bounds: list[int] = []
        for (first, end), at in zip(pairs(box), self.at, strict=True):
            inside = first < end if at is None else first <= at < end
            if not inside:
                return None
            bounds += (first, end) if at is None else (at, at + 1)
        return tuple(bounds)

    def rows_and_cols(self, box: Box) -> tuple[int, int, int, int]:
        """Bounds (top, bottom, left, right) of a box in the section."""
        rows, cols = (pair for pair, at in zip(pairs(box), self.at, strict=True) if at is None)
        return (*rows, *cols)

    def flat(self, values: Array, box: Box) -> Array:
        """Reshape values (*spatial, ...) of a box within to (rows, columns, ...)."""
        top, bottom, left, right = self.rows_and_cols(box)
        return values.reshape(bottom - top, right - left, *values.shape[len(self.at) :])


def sections(size: Sequence[int]) -> list[Section]:
    """Sections of a volume: axial, coronal, sagittal."""
    small = thumbnail_size(size)
    slices = []
    for hidden in range(3):
        first, second = (dim for dim in range(3) if dim != hidden)
        at = tuple(n // 2 if dim == hidden else None for dim, n in enumerate(size))
        shown, few = (size[first], size[second]), (small[first], small[second])
        slices.append(Section(at, shown, few))
    return slices


def thumbnail_size(size: Sequence[int]) -> tuple[int, ...]:
    """Size of the thumbnail of an image; never larger than the image."""
    zoom = min(1.0, SIDE / max(size))
    return tuple(max(1, int(n * zoom)) for n in size)


def sums(pixels: Array, box: Box, size: Sequence[int], small: Sequence[int]) -> Patch:
    """Sum the pixels of a box into the thumbnail pixels that it touches.

    Args:
        pixels: (rows, columns, channels) of the box.
        box: (row0, row1, col0, col1) in the image.
        size: (H, W) of the image.
        small: (H, W) of the thumbnail.
    """
    row, rows = _starts(box[0], box[1], size[0], small[0])
    col, cols = _starts(box[2], box[3], size[1], small[1])
    dtype = np.float64 if pixels.dtype.kind == "f" else np.int64
    added = np.add.reduceat(np.add.reduceat(pixels, rows, 0, dtype), cols, 1, dtype)
    return Patch(row, col, added)


def middles(mask: Array, box: Box, size: Sequence[int], small: Sequence[int]) -> Patch:
    """Select the pixels of a box (rows, columns) for the thumbnail of a mask; see `sums`."""
    row, rows = _middles(box[0], box[1], size[0], small[0])
    col, cols = _middles(box[2], box[3], size[1], small[1])
    return Patch(row, col, mask[rows[:, None], cols[None, :]])


def mask_patches(mask: Tensor, box: Box, size: Sequence[int]) -> list[Patch | None]:
    """A rank's patches of the sections of a mask; None for sections outside its box.

    Args:
        mask: (*spatial), mask of the box.
        box: box of the rank in the image.
        size: size of the image.
    """

    def read(inside: Box) -> Array:
        values: Array = mask[window_in(inside, box)].to("cpu", torch.int32).numpy()
        return values

    return _patches(read, box, size, middles)


def pixel_patches(
    read: Callable[[Box], Array], box: Box, size: Sequence[int]
) -> list[Patch | None]:
    """A rank's patches of the sections of an image; None for sections outside its box.

    Args:
        read: returns the pixels (*spatial, channels) of a box within that of the rank.
        box: box of the rank in the image.
        size: size of the image.
    """
    return _patches(read, box, size, sums)


def _patches(
    read: Callable[[Box], Array],
    box: Box,
    size: Sequence[int],
    shrunk: Callable[[Array, Box, Sequence[int], Sequence[int]], Patch],
) -> list[Patch | None]:
    patches: list[Patch | None] = []
    for section in sections(size):
        inside = section.within(box)
        if inside is None:
            patches.append(None)
            continue
        pixels, place = section.flat(read(inside), inside), section.rows_and_cols(inside)
        patches.append(shrunk(pixels, place, section.size, section.small))
    return patches


def window_in(inside: Box, box: Box) -> tuple[slice, ...]:
    """Slices of a box in the values of an enclosing box."""
    starts = [first for first, _ in pairs(box)]
    spans = zip(pairs(inside), starts, strict=True)
    return tuple(slice(first - start, end - start) for (first, end), start in spans)


def _starts(begin: int, end: int, size: int, small: int) -> tuple[int, Array]:
    """First thumbnail pixel that [begin, end) touches, and the start of each one."""
    bounds = np.asarray(even_bounds(size, small))
    first = int(np.searchsorted(bounds, begin, side="right")) - 1
    last = int(np.searchsorted(bounds, end, side="left"))
    return first, np.maximum(bounds[first:last], begin) - begin


def _middles(begin: int, end: int, size: int, small: int) -> tuple[int, Array]:
    bounds = np.asarray(even_bounds(size, small))
    middle = (bounds[:-1] + bounds[1:]) // 2
    first = int(np.searchsorted(middle, begin))
    return first, middle[first : int(np.searchsorted(middle, end))] - begin


def joined(patches: Sequence[Patch], shape: tuple[int, ...]) -> Array:
    """Sum the patches of a thumbnail."""
    whole = np.zeros(shape, np.result_type(*(one.values.dtype for one in patches), np.int64))
    for row, col, values in patches:
        rows, cols = values.shape[:2]
        whole[row : row + rows, col : col + cols] += values
    return whole


def joined_sections(parts: Sequence[Sequence[Patch | None]], size: Sequence[int]) -> list[Array]:
    """Join the `mask_patches` of all ranks to the sections of a mask of `size`."""
    return [
        joined([patch for patch in own if patch is not None], section.small)
        for section, own in zip(sections(size), zip(*parts, strict=True), strict=True)
    ]


def mean_sections(parts: Sequence[Sequence[Patch | None]], size: Sequence[int]) -> list[Array]:
    """Join all ranks' `pixel_patches` to thumbnails (rows, columns, channels) per section."""
    thumbnails = []
    for section, own in zip(sections(size), zip(*parts, strict=True), strict=True):
        patches = [patch for patch in own if patch is not None]
        rows, cols = (
            np.diff(even_bounds(n, few)) for n, few in zip(section.size, section.small, strict=True)
        )
        whole = joined(patches, (*section.small, patches[0].values.shape[2]))
        thumbnails.append(np.asarray(whole / (rows[:, None] * cols[None, :])[..., None]))
    return thumbnails


def overlaid(image: npt.NDArray[np.uint8], classes: Array) -> npt.NDArray[np.uint8]:
    """Overlay an image with class colours."""
    tint = COLOURS[(classes - 1) % len(COLOURS)]
    shown = ((classes > 0) & (classes != UNLABELLED))[..., None]
    mixed = (1 - _OPACITY) * image + _OPACITY * tint
    return np.where(shown, mixed, image).round().astype(np.uint8)


def heated(
    image: npt.NDArray[np.uint8], values: Array, most: float | None = None
) -> npt.NDArray[np.uint8]:
    """Overlay an image with a heat map.

    Args:
        image: (rows, columns, 3).
        values: (rows, columns), at most those of the image.
        most: value of the last colour, the first is 0; None uses the maximum.
    """
    from matplotlib import colormaps

    rows, cols = (
        (2 * np.arange(many) + 1) * few // (2 * many)
        for many, few in zip(image.shape[:2], values.shape, strict=True)
    )
    most = values.max() if most is None else most
    shares = (values / (most if most > 0 else 1.0)).clip(0, 1)
    colours = 255 * colormaps[HEAT_COLOURS](shares)[rows[:, None], cols[None, :], :3]
    mixed = (1 - HEAT_OPACITY) * faint(image)[..., None] + HEAT_OPACITY * colours
    return np.asarray(mixed.round(), np.uint8)


def faint(image: npt.NDArray[np.uint8]) -> Array:
    """Convert an image to light grey (rows, columns), so that overlaid colours stay true."""
    return np.asarray(255 - (255 - image.mean(2)) * 0.6)
