"""Crops, flips and turns: which box of the stored image a box of the changed one is.

A changed image is a window on the stored one, which may reach beyond its edges, mirrored and
turned. So a box of it is a box of the stored image, and the rest is the order of its pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spatialdl.data.augmentation.drawing import Draw
from spatialdl.data.image_source import Box, Pixels


@dataclass(frozen=True)
class Window:
    """Where a changed image lies in the stored one.

    Its pixel (r, c) is the stored one at (row0 + r', col0 + c'), where (r', c') is (r, c),
    mirrored within `size` as told, and then with rows and columns swapped if transposed.

    Attributes:
        size: (H, W) of the changed image.
        row0, col0: upper left corner in the stored image; may be negative.
    """

    size: tuple[int, int]
    row0: int
    col0: int
    transposed: bool
    mirror_rows: bool
    mirror_cols: bool

    def source_box(self, box: Box) -> Box:
        """The box of the stored image under a box of the changed one; may reach beyond it."""
        row0, row1, col0, col1 = box
        if self.mirror_rows:
            row0, row1 = self.size[0] - row1, self.size[0] - row0
        if self.mirror_cols:
            col0, col1 = self.size[1] - col1, self.size[1] - col0
        if self.transposed:
            row0, row1, col0, col1 = col0, col1, row0, row1
        return row0 + self.row0, row1 + self.row0, col0 + self.col0, col1 + self.col0

    def arrange(self, pixels: Pixels) -> Pixels:
        """Stored pixels (rows, cols, ...) of a `source_box` in the order of the changed image."""
        if self.transposed:
            pixels = pixels.swapaxes(0, 1)
        if self.mirror_rows:
            pixels = pixels[::-1]
        if self.mirror_cols:
            pixels = pixels[:, ::-1]
        return pixels


def window_of(draw: Draw, stored: tuple[int, int], size: tuple[int, int]) -> Window:
    """Where the image of `size` that was drawn lies in one of size `stored`.

    An image smaller than that lies in the middle.
    """
    # a quarter turn counterclockwise is: swap rows and columns, then mirror top to bottom
    transposed = draw.turns % 2 == 1
    rows, cols = draw.flip_rows, draw.flip_cols
    if transposed:
        rows, cols = cols, rows
    rows, cols = rows ^ (draw.turns in (1, 2)), cols ^ (draw.turns in (2, 3))
    height, width = size[::-1] if transposed else size
    crop = draw.crop or (None, None)
    row0 = _begin(crop[0], stored[0] - height)
    col0 = _begin(crop[1], stored[1] - width)
    return Window(size, row0, col0, transposed, rows, cols)


def _begin(part: float | None, left: int) -> int:
    """Where a crop begins that leaves so many pixels over; below 0, the image is smaller."""
    return left // 2 if part is None or left <= 0 else int(part * (left + 1))


def read_padded(
    read: Callable[[Box], Pixels], stored: tuple[int, int], box: Box, empty: Callable[[], Pixels]
) -> Pixels:
    """A box that may reach beyond a stored image.

    Args:
        read: reads a box that lies inside and is not empty.
        stored: (h, w) of the image.
        empty: makes the box as it is where there is no image.
    """
    row0, row1, col0, col1 = box
    top, bottom = max(row0, 0), min(row1, stored[0])
    left, right = max(col0, 0), min(col1, stored[1])
    if (top, bottom, left, right) == box and top < bottom and left < right:
        return read(box)
    pixels = empty()
    if top < bottom and left < right:
        inside = read((top, bottom, left, right))
        pixels[top - row0 : bottom - row0, left - col0 : right - col0] = inside
    return np.asarray(pixels)
