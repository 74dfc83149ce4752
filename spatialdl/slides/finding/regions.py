"""Annotated regions of a slide, and their rasterisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ring = npt.NDArray[np.float64]  # (corners, 2): level-0 x, y; the last is joined to the first
Mask = npt.NDArray[np.bool_]

_CROSSINGS = 2**20  # intersections of edges and rows computed at a time
NOTHING = 0  # value of a class map in no region


@dataclass(frozen=True, eq=False)
class Region:
    """An annotated polygon: its outline, its holes, and its class, if any."""

    outline: Ring
    holes: tuple[Ring, ...] = ()
    label: str | None = None

    @property
    def area(self) -> float:
        """Area of the outline, in level-0 pixels."""
        x, y = self.outline.T
        return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)

    def moved(self, by: tuple[float, float]) -> Region:
        """Return the region moved by level-0 x, y."""
        return Region(self.outline + by, tuple(hole + by for hole in self.holes), self.label)


def class_names(regions: Sequence[Region]) -> list[str | None]:
    """Return the classes of regions, sorted by name; None, for no class, comes first."""
    names: set[str | None] = {region.label for region in regions}
    return sorted(names, key=lambda name: (name is not None, name or ""))


def class_map(
    regions: Sequence[Region], shape: tuple[int, int], scale: float
) -> npt.NDArray[np.uint16]:
    """Rasterise regions: for each pixel 1 + the index of its class in `class_names`, or 0.

    A pixel belongs to a region that contains its centre. Of overlapping regions the smallest
    wins: regions inside of a larger one are more specific.

    Args:
        regions: in level-0 pixels; clipped to the slide.
        shape: rows and columns of the map.
        scale: level-0 pixels per pixel of the map.
    """
    names = class_names(regions)
    classes = np.full(shape, NOTHING, np.uint16)
    for region in sorted(regions, key=lambda region: -region.area):
        # only its bounding box: there may be thousands of regions
        first = np.clip(np.floor(region.outline.min(0) / scale), 0, shape[::-1]).astype(int)
        last = np.clip(np.ceil(region.outline.max(0) / scale), 0, shape[::-1]).astype(int)
        part = classes[first[1] : last[1], first[0] : last[0]]
        inside = filled(region.outline / scale - first, part.shape)
        for hole in region.holes:
            inside &= ~filled(hole / scale - first, part.shape)
        part[inside] = names.index(region.label) + 1
    return classes


def filled(ring: Ring, shape: tuple[int, ...]) -> Mask:
    """Fill a polygon: pixels with centres inside, by the even-odd rule.

    In each row that it crosses, an edge flips all pixels right of the crossing.
    """
    rows, cols = shape
    # pixel centres become integers
    x0, y0 = ring.T - 0.5
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # an edge covers rows [upper end, lower end), so that corners count once
    first = np.clip(np.ceil(np.minimum(y0, y1)), 0, rows).astype(np.int64)
    last = np.clip(np.ceil(np.maximum(y0, y1)), 0, rows).astype(np.int64)
    flips = np.zeros(rows * (cols + 1), np.int64)
    # in groups of edges, to limit the memory
    for some in _shares(last - first):
        counts = (last - first)[some]
        edge = np.repeat(np.arange(len(ring))[some], counts)
        row = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + first[edge]
        across = (x1 - x0)[edge] * ((row - y0[edge]) / (y1 - y0)[edge])
        col = np.clip(np.ceil(x0[edge] + across), 0, cols).astype(np.int64)
        flips += np.bincount(row * (cols + 1) + col, minlength=rows * (cols + 1))
    inside = flips.reshape(rows, cols + 1)[:, :cols].cumsum(1) % 2
    return np.asarray(inside, bool)


def _shares(counts: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Slices of edges with at most `_CROSSINGS` row crossings each, or a single edge."""
    ends = counts.cumsum()
    begin = 0
    while begin < len(counts):
        before = ends[begin] - counts[begin]
        end = max(begin + 1, int(np.searchsorted(ends, before + _CROSSINGS, "right")))
        yield slice(begin, end)
        begin = end
