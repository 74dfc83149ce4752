"""Crops, flips and turns: which box of the stored image a box of the changed one is.

A changed image is a window on the stored one, which may reach beyond its edges, mirrored and
turned. So a box of it is a box of the stored image, and the rest is the order of its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spatialdl.data.augmentation.drawing import Draw
from spatialdl.data.image_source import Box, Pixels, extents, pairs


@dataclass(frozen=True)
class CropWindow:
    """Where a changed image lies in the stored one.

    Its pixel (r, c) is the stored one at `corner` + (r', c'), where (r', c') is (r, c), mirrored
    within `size` as drawn, and then with rows and columns swapped if transposed. Of a volume slices
    come first, which are never swapped.

    Attributes:
        size: ([D,] H, W) of the changed image.
        corner: its first pixel in the stored image; may be negative.
        transposed: rows and columns are swapped.
        mirrored: along each dim.
    """

    size: tuple[int, ...]
    corner: tuple[int, ...]
    transposed: bool
    mirrored: tuple[bool, ...]

    def source_box(self, box: Box) -> Box:
        """The box of the stored image under a box of the changed one; may reach beyond it."""
        spans = [
            (n - stop, n - start) if mirrored else (start, stop)
            for (start, stop), n, mirrored in zip(pairs(box), self.size, self.mirrored, strict=True)
        ]
        if self.transposed:
            spans[-2:] = spans[:-3:-1]
        moved = zip(spans, self.corner, strict=True)
        return tuple(at + first for span, first in moved for at in span)

    def arrange(self, pixels: Pixels) -> Pixels:
        """Stored pixels ([slices,] rows, cols, ...) of a `source_box` in the changed order."""
        dims = len(self.size)
        if self.transposed:
            pixels = pixels.swapaxes(dims - 2, dims - 1)
        return pixels[tuple(slice(None, None, -1 if flip else 1) for flip in self.mirrored)]


def window_of(draw: Draw, stored: Sequence[int], size: Sequence[int]) -> CropWindow:
    """Where the image of `size` that was drawn lies in one of size `stored`.

    An image smaller than that lies in the middle.
    """
    # a quarter turn counterclockwise is: swap rows and columns, then mirror top to bottom
    transposed = draw.turns % 2 == 1
    rows, cols = draw.flip_rows, draw.flip_cols
    if transposed:
        rows, cols = cols, rows
    rows, cols = rows ^ (draw.turns in (1, 2)), cols ^ (draw.turns in (2, 3))
    taken = (*size[:-2], size[-1], size[-2]) if transposed else tuple(size)
    crop = draw.crop or (None, None, None)
    left = (has - wanted for has, wanted in zip(stored, taken, strict=True))
    corner = tuple(map(_begin, crop[-len(size) :], left))
    return CropWindow(tuple(size), corner, transposed, (draw.flip_slices, rows, cols)[-len(size) :])


def _begin(part: float | None, left: int) -> int:
    """Where a crop begins that leaves so many pixels over; below 0, the image is smaller."""
    return left // 2 if part is None or left <= 0 else int(part * (left + 1))


def read_padded(
    read: Callable[[Box], Pixels], stored: Sequence[int], box: Box, empty: Callable[[], Pixels]
) -> Pixels:
    """A box that may reach beyond a stored image.

    Args:
        read: reads a box that lies inside and is not empty.
        stored: ([d,] h, w) of the image.
        empty: makes the box as it is where there is no image.
    """
    inside = clipped(box, stored)
    filled = min(extents(inside)) > 0
    if filled and inside == box:
        return read(box)
    pixels = empty()
    if filled:
        cuts = zip(pairs(inside), box[::2], strict=True)
        where = tuple(slice(start - first, stop - first) for (start, stop), first in cuts)
        pixels[where] = read(inside)
    return np.asarray(pixels)


def clipped(box: Box, stored: Sequence[int]) -> Box:
    """The part of a box inside an image; where it is empty, an end may precede a start."""
    spans = zip(pairs(box), stored, strict=True)
    return tuple(at for (start, stop), n in spans for at in (max(start, 0), min(stop, n)))
