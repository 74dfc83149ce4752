"""Grid of tiles over a slide: resolution, positions, and the fraction of each in a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide

Floats = npt.NDArray[np.float64]
Edge = Literal["drop", "pad", "shift"]
EDGES: tuple[Edge, ...] = ("drop", "pad", "shift")
"""At the edge of a slide: no tile, one padded beyond the slide, or one shifted back into it."""

SLACK = 0.01
"""Fraction of a tile that may be beyond the edge, since sizes are rounded."""

_DIGITS = 6  # of fractions of tiles


def tile_starts(
    length: int, needed: float, spans: tuple[float, float, float], edge: Edge
) -> Floats:
    """Compute where tiles begin along one dim, in level-0 pixels.

    Args:
        length: of the slide, in level-0 pixels, as are all lengths here.
        needed: length of a tile that must be inside the slide.
        spans: length of a tile, stride, and length of a pixel of a tile.
        edge: see `plan_tiles`.
    """
    step, stride, pixel = spans
    count = _fitting(length, needed, stride)
    starts: list[float] = [number * stride for number in range(count)]
    end = starts[-1] + step if starts else 0.0
    if length - end >= pixel:  # less is a rounding error
        if edge == "pad":
            starts.append(count * stride)
        elif edge == "shift" and starts:
            # at a pixel of the level, so that no pixel is interpolated
            unit = pixel if float(pixel).is_integer() else 1.0
            starts.append((length - step) // unit * unit)
    return np.array(starts, np.float64)


def _fitting(length: int, needed: float, stride: float) -> int:
    """Number of tiles that fit into a length."""
    room = length - needed
    return int(room / stride) + 1 if room >= 0 else 0


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles, in pixels of level 0 or of a thumbnail.

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
        """Return the grid on a thumbnail with `factor` times the pixels along each dim."""
        rows, cols = self.starts
        height, width = self.extent
        extent = height * factor, width * factor
        return TileGrid((rows * factor, cols * factor), self.step * factor, extent)

    def fractions(self, mask: npt.NDArray[np.bool_]) -> Floats:
        """Return the exact fraction of each tile in the mask; partial pixels count in proportion.

        The part of a tile beyond the slide is not in the mask. If it is less than a hundredth of
        the tile, it is excluded from the area of the tile.
        """
        (top, bottom, rows), (left, right, cols) = self._spans(0), self._spans(1)
        total = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int32)
        np.cumsum(mask, 0, out=total[1:, 1:])
        np.cumsum(total, 1, out=total)
        bands = _between(total, top, bottom)
        inside = _between(bands.T, left, right).T
        # rounded, since sums of partial pixels are not exact: full tiles must have exactly 1
        return np.round(inside / (rows[:, None] * cols[None, :]), _DIGITS)

    def shares(self, mask: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """Return the fraction of the slide in the mask, and the fraction of that off the grid."""
        area = _area(mask, self.extent)
        rows, cols = (self._spans(dim)[1].max(initial=0.0) for dim in (0, 1))
        part = area / (self.extent[0] * self.extent[1])
        return part, round(1 - _area(mask, (rows, cols)) / area, _DIGITS) if part else 0.0

    def _spans(self, dim: int) -> tuple[Floats, Floats, Floats]:
        """Begin and end of each tile, clipped to the slide, and its length for fractions."""
        first = np.minimum(self.starts[dim], self.extent[dim])
        last = np.minimum(self.starts[dim] + self.step, self.extent[dim])
        inside = last - first
        return first, last, np.where(inside < self.step * (1 - SLACK), self.step, inside)


def _area(mask: npt.NDArray[np.bool_], size: tuple[float, float]) -> float:
    """Number of mask pixels within the first rows and columns, which may end within a pixel."""
    rows, cols = (
        np.clip(length - np.arange(count), 0, 1)
        for length, count in zip(size, mask.shape, strict=True)
    )
    return float(rows @ (mask @ cols))


def _between(total: npt.NDArray[Any], first: Floats, last: Floats) -> Floats:
    """Sums over rows between two places, from cumulative sums, interpolated linearly."""

    def up_to(places: Floats) -> Floats:
        row = np.minimum(places.astype(np.int64), len(total) - 2)
        part = (places - row)[:, None]
        return np.asarray(total[row] * (1 - part) + total[row + 1] * part, np.float64)

    return up_to(last) - up_to(first)


_FINEST = 0.9  # smallest mpp relative to the slide's own; less would interpolate pixels


class Wanted(NamedTuple):
    """Target resolution of tiles; exactly one of the three is set.

    `mpp` is micrometres per pixel, `mag` an objective power, `level` a level of the slide.
    """

    mpp: float | None = None
    mag: float | None = None
    level: int | None = None

    def scale(self, slide: Slide) -> float:
        """Return level-0 pixels per pixel, rounded to a level within 1 %.

        Raises:
            SlideError: the slide has no resolution, a coarser one, or no such level.
        """
        if self.level is not None:
            return _of_level(slide, self.level)
        if self.mpp is not None:
            own = slide.mpp
            if self.mpp < _FINEST * own:
                raise SlideError(
                    f"slide {slide.path} has {own:g} micrometres per pixel and cannot give "
                    f"{self.mpp:g}; set an mpp of {own:g} or more"
                )
            return slide.scale(self.mpp)
        mag, power = self.mag or 0.0, slide.objective_power
        if mag > power / _FINEST:
            raise SlideError(
                f"slide {slide.path} was taken at {power:g}x and cannot give {mag:g}x; "
                f"set {power:g} or less"
            )
        return slide.nearest(power / mag)


def _of_level(slide: Slide, level: int) -> float:
    if level >= len(slide.downsamples):
        raise SlideError(
            f"slide {slide.path} has levels 0 to {len(slide.downsamples) - 1}, and no level "
            f"{level}; set one of them, or an mpp"
        )
    return slide.downsamples[level]
