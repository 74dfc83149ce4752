"""Synthetic images with a class for every pixel, generated box by box.

Discs of random classes, in volumes balls, lie on a background of class 0, later ones on top. Each
class has its own colour, under noise so strong that a single pixel does not reveal its class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import extents, pairs
from spatialdl.data.synthetic import Pixels, SyntheticDataset, mix, noise

DISCS = 12
"""Discs per image, with radii from 1/16 to 1/4 of its shortest side."""


class Disc(NamedTuple):
    """Position of a disc, in pixels, and its class."""

    centre: tuple[int, ...]
    radius: int
    label: int


class SyntheticMasks(SyntheticDataset):
    """Deterministic images with masks; arguments as for `SyntheticDataset`."""

    has_masks = True

    def read(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """A box (row0, row1, col0, col1) of a sample: uint8 (rows, columns, channels)."""
        colours = _colours(len(self.classes), self.channels)
        pixels = colours[self.read_mask(sample, box)]
        pixels += noise(self._key(sample), self._box(box), self.channels)
        return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)

    def read_mask(self, sample: int, box: tuple[int, ...] | None = None) -> Pixels:
        """The class of every pixel of a box: uint8 (rows, columns)."""
        own = self._box(box)
        mask = np.zeros(extents(own), np.uint8)
        for disc in self._discs(sample):
            _draw(mask, own, disc)
        return mask

    def _discs(self, sample: int) -> list[Disc]:
        numbers = len(self._size) + 2
        draws = mix(
            self._key(sample)
            + (np.uint64(1) << np.uint64(41))
            + np.arange(numbers * DISCS, dtype=np.uint64)
        )
        shorter, classes = min(self._size), len(self.classes)
        discs = []
        for *places, radius, label in draws.reshape(DISCS, numbers).tolist():
            span = 3 * shorter // 16 + 1
            centre = tuple(place % n for place, n in zip(places, self._size, strict=True))
            discs.append(Disc(centre, shorter // 16 + radius % span, label % classes))
        return discs


def _draw(mask: Pixels, box: tuple[int, ...], disc: Disc) -> None:
    """Fill the part of a disc that lies in `box`."""
    inside = [
        (max(start, place - disc.radius), min(stop, place + disc.radius + 1))
        for (start, stop), place in zip(pairs(box), disc.centre, strict=True)
    ]
    if any(start >= stop for start, stop in inside):
        return
    squares = np.zeros((), np.int64)
    for (start, stop), place in zip(inside, disc.centre, strict=True):
        squares = squares[..., None] + (np.arange(start, stop, dtype=np.int64) - place) ** 2
    window = tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(inside, pairs(box), strict=True)
    )
    mask[window][squares <= disc.radius * disc.radius] = disc.label


@lru_cache(maxsize=16)
def _colours(classes: int, channels: int) -> npt.NDArray[np.int16]:
    """(classes, channels) around 128: evenly spread in the first channel, random in the rest."""
    values = mix(np.arange(classes * channels, dtype=np.uint64)).reshape(classes, channels)
    colours = 80 + (values % np.uint64(97)).astype(np.int16)
    colours[:, 0] = 80 + 96 * np.arange(classes) // max(classes - 1, 1)
    return colours
