"""Maps per class over a slide: of tiles, as overviews, as pyramidal TIFFs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.slides.pyramid import TILE, write_pyramid

Bands = Iterator[npt.NDArray[Any]]
Array = npt.NDArray[Any]
ROWS = 2 * TILE
"""Rows of a band."""
LONGEST = 1600
"""Longer side of an overview map at most, in pixels."""
_LEAST = 8
"""Least pixels of a map along a tile's side, to resolve overlaps."""


class ClassMap(Protocol):
    """A map per class over a slide; iterating bands is collective, rank 0 gets the values."""

    @property
    def size(self) -> tuple[int, int]: ...

    def bands(self, column: int, rows: int) -> Bands: ...


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


class Overview:
    """A downsampled map of one class, accumulated band by band.

    Args:
        size: rows and columns of the full map.

    Attributes:
        factor: downsampling factor along each dim.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.factor = max(1, ceil(max(size) / LONGEST))
        shape = ceil(size[0] / self.factor), ceil(size[1] / self.factor)
        self._sums, self._counts, self._row = np.zeros(shape), np.zeros(shape), 0

    def accumulate(self, bands: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        """Accumulate and pass through the bands, from top to bottom."""
        for band in bands:
            if not band.size:  # on ranks that have no values
                yield band
                continue
            known = np.isfinite(band)
            at = (self._row + np.arange(len(band))) // self.factor
            self._row += len(band)
            for total, values in ((self._sums, np.where(known, band, 0)), (self._counts, known)):
                starts = range(0, band.shape[1], self.factor)
                np.add.at(total, at, np.add.reduceat(values, starts, axis=1, dtype=np.float64))
            yield band

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The overview (rows, columns), NaN where the map has no value."""
        with np.errstate(invalid="ignore"):
            return self._sums / self._counts


def save_class_map(
    path: Path | None,
    found: ClassMap,
    column: int,
    limits: tuple[float, float],
    mpp: float | None,
    tags: Mapping[str, Any],
) -> Array:
    """Write the map of a class as a pyramid, in values of 1 to 255; collective.

    Args:
        path: the file; None on ranks that do not write, and if only the overview is needed.
        column: index of the class.
        limits: values at 1 and at 255.
        mpp: micrometres per pixel, if known.
        tags: description of the values.

    Returns:
        The overview, valid on rank 0.
    """
    overview = Overview(found.size)
    bands = overview.accumulate(found.bands(column, ROWS))
    if path is None:
        for _ in bands:
            pass
        return overview.means
    about = {**tags, "value_at_1": limits[0], "value_at_255": limits[1], "not_examined": 0}
    write_pyramid(
        path,
        (as_bytes(band, limits) for band in bands),
        found.size,
        mpp,
        grey=True,
        empty=True,
        description=json.dumps(about),
    )
    return overview.means


def as_bytes(band: npt.NDArray[Any], limits: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """Scale values within the limits to 1...255; NaN becomes 0."""
    shares = (np.nan_to_num(band, nan=limits[0]) - limits[0]) / (limits[1] - limits[0])
    levels = 1 + np.rint(254 * shares.clip(0, 1))
    return np.asarray(np.where(np.isnan(band), 0, levels), np.uint8)
