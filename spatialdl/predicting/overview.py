"""A map made small: means of its pixels, taken while its bands pass by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST = 1600
"""Pixels of its longer side, at most."""


class Overview:
    """The small map of one class.

    Args:
        size: rows and columns of the whole map.

    Attributes:
        factor: pixels of the map per pixel, along one dim.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.factor = max(1, ceil(max(size) / LONGEST))
        shape = ceil(size[0] / self.factor), ceil(size[1] / self.factor)
        self._sums, self._counts, self._row = np.zeros(shape), np.zeros(shape), 0

    def seen(self, bands: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        """The same bands, from the top of the map to its bottom."""
        for band in bands:
            known = np.isfinite(band)
            at = (self._row + np.arange(len(band))) // self.factor
            self._row += len(band)
            for total, values in ((self._sums, np.where(known, band, 0)), (self._counts, known)):
                starts = range(0, band.shape[1], self.factor)
                np.add.at(total, at, np.add.reduceat(values, starts, axis=1, dtype=np.float64))
            yield band

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """(rows, columns), NaN where the map has no value."""
        with np.errstate(invalid="ignore"):
            return self._sums / self._counts
