"""The map of a slide predicted tile by tile, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 8
"""Least pixels of a map along a tile's side, to resolve overlaps."""


class TileMap:
    """A map of tile values at their positions; the mean where tiles overlap.

    Args:
        places: (N, 2), level-0 x and y of the tiles.
        span: level-0 rows and columns of a tile.
        extent: level-0 rows and columns of the slide.
        values: (N, classes, rows, columns), a grid of values over each tile.

    Attributes:
        scale: level-0 pixels per pixel of the map.
        size: rows and columns of the map.
    """

    def __init__(
        self,
        places: npt.NDArray[np.int64],
        span: tuple[float, float],
        extent: tuple[int, int],
        values: npt.NDArray[Any],
    ) -> None:
        self.scale = max(1.0, span[0] / max(_LEAST, values.shape[2]))
        self.size = ceil(extent[0] / self.scale), ceil(extent[1] / self.scale)
        self._values = values
        self._rows = self._edges(places[:, 1], span[0])
        self._cols = self._edges(places[:, 0], span[1])

    def _edges(self, starts: npt.NDArray[Any], span: float) -> npt.NDArray[np.int64]:
        """(N, 2): first pixel of each tile, and one past its last."""
        first = np.rint(starts / self.scale)
        last = np.maximum(np.rint((starts + span) / self.scale), first + 1)
        return np.stack([first, last], 1).astype(np.int64)

    def bands(self, column: int, rows: int) -> Iterator[npt.NDArray[np.float64]]:
        """Iterate over the map of a class, `rows` rows at a time; NaN outside tiles."""
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            sums = np.zeros((last - first, self.size[1]))
            counts = np.zeros(sums.shape, np.int32)
            inside = (self._rows[:, 0] < last) & (self._rows[:, 1] > first)
            for number in np.flatnonzero(inside).tolist():
                place, part = self._part(number, column, first, last)
                sums[place] += part
                counts[place] += 1
            with np.errstate(invalid="ignore"):
                yield sums / counts

    def _part(self, number: int, column: int, first: int, last: int) -> tuple[Any, Any]:
        """The slice of a tile within a band, and its values there."""
        (top, bottom), (left, right) = self._rows[number], self._cols[number]
        values = self._values[number, column]
        row0, row1 = max(first, top), min(last, bottom)
        # a tile may end beyond the slide
        col0, col1 = max(0, left), max(0, left, min(self.size[1], right))
        at_rows = (np.arange(row0, row1) - top) * values.shape[0] // (bottom - top)
        at_cols = (np.arange(col0, col1) - left) * values.shape[1] // (right - left)
        return np.s_[row0 - first : row1 - first, col0:col1], values[np.ix_(at_rows, at_cols)]
