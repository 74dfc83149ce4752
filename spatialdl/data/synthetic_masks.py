"""Synthetic images with a class for every pixel, made box by box like those with labels.

Discs of random classes lie on a background of class 0, later ones on top. Every class has its own
colour, under noise so strong that a pixel alone does not tell its class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.data.synthetic import Pixels, SyntheticDataset, mix, noise

DISCS = 12
"""Discs in an image, of a radius from 1/16 to 1/4 of its shorter side."""


class Disc(NamedTuple):
    """Where a disc lies, in pixels, and its class."""

    row: int
    col: int
    radius: int
    label: int


class SyntheticMasks(SyntheticDataset):
    """Deterministic images with masks; arguments as of `SyntheticDataset`."""

    has_masks = True

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        colours = _colours(len(self.classes), self.channels)
        pixels = colours[self.read_mask(sample, box)]
        pixels += noise(self._key(sample), self._box(box), self.channels)
        return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """The class of every pixel of a box: uint8 (rows, columns)."""
        row0, row1, col0, col1 = own = self._box(box)
        mask = np.zeros((row1 - row0, col1 - col0), np.uint8)
        for disc in self._discs(sample):
            _draw(mask, own, disc)
        return mask

    def _discs(self, sample: int) -> list[Disc]:
        height, width = self._size
        draws = mix(
            self._key(sample)
            + (np.uint64(1) << np.uint64(41))
            + np.arange(4 * DISCS, dtype=np.uint64)
        )
        shorter, classes = min(height, width), len(self.classes)
        discs = []
        for row, col, radius, label in draws.reshape(DISCS, 4).tolist():
            span = 3 * shorter // 16 + 1
            discs.append(
                Disc(row % height, col % width, shorter // 16 + radius % span, label % classes)
            )
        return discs


def _draw(mask: Pixels, box: tuple[int, ...], disc: Disc) -> None:
    """Fill the part of a disc that lies in `box`."""
    top, bottom, left, right = box
    row0, row1 = max(top, disc.row - disc.radius), min(bottom, disc.row + disc.radius + 1)
    col0, col1 = max(left, disc.col - disc.radius), min(right, disc.col + disc.radius + 1)
    if row0 >= row1 or col0 >= col1:
        return
    rows = np.arange(row0, row1, dtype=np.int64)[:, None] - disc.row
    cols = np.arange(col0, col1, dtype=np.int64)[None, :] - disc.col
    part = mask[row0 - top : row1 - top, col0 - left : col1 - left]
    part[rows * rows + cols * cols <= disc.radius * disc.radius] = disc.label


@lru_cache(maxsize=16)
def _colours(classes: int, channels: int) -> npt.NDArray[np.int16]:
    """(classes, channels) around 128: in the first channel evenly spread, then at random."""
    values = mix(np.arange(classes * channels, dtype=np.uint64)).reshape(classes, channels)
    colours = 80 + (values % np.uint64(97)).astype(np.int16)
    colours[:, 0] = 80 + 96 * np.arange(classes) // max(classes - 1, 1)
    return colours
