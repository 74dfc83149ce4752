"""The grid of tiles over a slide: where they begin, and what part of each is in a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Edge = Literal["drop", "pad", "shift"]
EDGES: tuple[Edge, ...] = ("drop", "pad", "shift")
"""Where no whole tile fits any more: none, one padded beyond the slide, one moved back into it."""

SLACK = 0.01
"""Part of a tile that may lie beyond the edge, since sizes are rounded."""

_DIGITS = 6  # of parts of tiles


def tile_starts(
    length: int, needed: float, spans: tuple[float, float, float], edge: Edge
) -> Floats:
    """Where the tiles of a length begin.

    Args:
        length: of the slide, in level-0 pixels like all others.
        needed: of each tile inside the slide.
        spans: of a tile, from a tile to the next, of a pixel of a tile.
        edge: see `plan_tiles`.
    """
    step, stride, pixel = spans
    count = _fitting(length, needed, stride)
    starts: list[float] = [number * stride for number in range(count)]
    end = starts[-1] + step if starts else 0.0
    if length - end >= pixel:  # less is how sizes are rounded
        if edge == "pad":
            starts.append(count * stride)
        elif edge == "shift" and starts:
            # at a pixel of the level, so that none has to be made of two
            unit = pixel if float(pixel).is_integer() else 1.0
            starts.append((length - step) // unit * unit)
    return np.array(starts, np.float64)


def _fitting(length: int, needed: float, stride: float) -> int:
    """How many tiles fit into a length, where each needs so much of it."""
    room = length - needed
    return int(room / stride) + 1 if room >= 0 else 0


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles, in level-0 pixels or in those of a thumbnail.

    Attributes:
        starts: first row of each row of tiles, and first column of each column.
        step: rows and columns of a tile.
        extent: rows and columns of the slide.
    """

    starts: tuple[Floats, Floats]
    step: float
    extent: tuple[float, float]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return len(self.starts[0]), len(self.starts[1])

    def scaled(self, factor: float) -> TileGrid:
        """The same on a thumbnail with `factor` times the pixels along each dim."""
        rows, cols = self.starts
        height, width = self.extent
        extent = height * factor, width * factor
        return TileGrid((rows * factor, cols * factor), self.step * factor, extent)

    def fractions(self, mask: npt.NDArray[np.bool_]) -> Floats:
        """Part of each tile that is in the mask, exactly: pixels count by the part in the tile.

        What lies beyond the slide is in no mask. It does not count at all where it is less than a
        hundredth of the tile.
        """
        (top, bottom, rows), (left, right, cols) = self._spans(0), self._spans(1)
        total = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int32)
        np.cumsum(mask, 0, out=total[1:, 1:])
        np.cumsum(total, 1, out=total)
        bands = _between(total, top, bottom)
        inside = _between(bands.T, left, right).T
        # sums of parts of pixels are not exact: a whole tile has to have all of itself
        return np.round(inside / (rows[:, None] * cols[None, :]), _DIGITS)

    def shares(self, mask: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """Part of the slide that is in the mask, and the part of that outside of the grid."""
        all_of_it = _area(mask, self.extent)
        rows, cols = (self._spans(dim)[1].max(initial=0.0) for dim in (0, 1))
        part = all_of_it / (self.extent[0] * self.extent[1])
        return part, round(1 - _area(mask, (rows, cols)) / all_of_it, _DIGITS) if part else 0.0

    def _spans(self, dim: int) -> tuple[Floats, Floats, Floats]:
        """First and last place of each tile inside the slide, and the length that counts."""
        first = np.minimum(self.starts[dim], self.extent[dim])
        last = np.minimum(self.starts[dim] + self.step, self.extent[dim])
        inside = last - first
        return first, last, np.where(inside < self.step * (1 - SLACK), self.step, inside)


def _area(mask: npt.NDArray[np.bool_], size: tuple[float, float]) -> float:
    """Pixels of a mask within its first rows and columns, which may end within a pixel."""
    rows, cols = (
        np.clip(length - np.arange(count), 0, 1)
        for length, count in zip(size, mask.shape, strict=True)
    )
    return float(rows @ (mask @ cols))


def _between(total: npt.NDArray[Any], first: Floats, last: Floats) -> Floats:
    """Sums over rows between two places, of sums up to each row; in between it is linear."""

    def up_to(places: Floats) -> Floats:
        row = np.minimum(places.astype(np.int64), len(total) - 2)
        part = (places - row)[:, None]
        return np.asarray(total[row] * (1 - part) + total[row + 1] * part, np.float64)

    return up_to(last) - up_to(first)
