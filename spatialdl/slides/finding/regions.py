"""Annotated regions of a slide, and what part of each tile they cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ring = npt.NDArray[np.float64]  # (corners, 2): level-0 x, y; the last is joined to the first
Mask = npt.NDArray[np.bool_]

_CROSSINGS = 2**20  # of rows by edges, at a time
NOTHING = 0  # in a map of classes: no region


@dataclass(frozen=True, eq=False)
class Region:
    """A polygon that someone drew: its outline, the holes in it, and its class if it has one."""

    outline: Ring
    holes: tuple[Ring, ...] = ()
    label: str | None = None

    @property
    def area(self) -> float:
        """Of the outline, in level-0 pixels."""
        x, y = self.outline.T
        return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)

    def moved(self, by: tuple[float, float]) -> Region:
        """The region elsewhere, by level-0 x, y."""
        return Region(self.outline + by, tuple(hole + by for hole in self.holes), self.label)


def class_names(regions: Sequence[Region]) -> list[str | None]:
    """The classes of regions, in order of their names, those without class first."""
    names: set[str | None] = {region.label for region in regions}
    return sorted(names, key=lambda name: (name is not None, name or ""))


def class_map(
    regions: Sequence[Region], shape: tuple[int, int], scale: float
) -> npt.NDArray[np.uint16]:
    """Which class every pixel of a thumbnail has: 1 + its index in `class_names`, or 0.

    A pixel is in a region if its centre is. Where regions overlap the smallest counts: what is
    drawn inside of a larger region is more specific.

    Args:
        regions: in level-0 pixels; what is outside of the slide is cut off.
        shape: rows and columns of the thumbnail.
        scale: level-0 pixels per pixel of it.
    """
    names = class_names(regions)
    classes = np.full(shape, NOTHING, np.uint16)
    for region in sorted(regions, key=lambda region: -region.area):
        # only where it is: there may be thousands
        first = np.clip(np.floor(region.outline.min(0) / scale), 0, shape[::-1]).astype(int)
        last = np.clip(np.ceil(region.outline.max(0) / scale), 0, shape[::-1]).astype(int)
        part = classes[first[1] : last[1], first[0] : last[0]]
        inside = filled(region.outline / scale - first, part.shape)
        for hole in region.holes:
            inside &= ~filled(hole / scale - first, part.shape)
        part[inside] = names.index(region.label) + 1
    return classes


def filled(ring: Ring, shape: tuple[int, ...]) -> Mask:
    """The pixels whose centres are inside of a polygon, by the even-odd rule.

    Every edge flips, in each row that it crosses, all pixels right of the crossing.
    """
    rows, cols = shape
    # pixel centres to integers
    x0, y0 = ring.T - 0.5
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # an edge has the rows in [its upper end, its lower end), so corners count once
    first = np.clip(np.ceil(np.minimum(y0, y1)), 0, rows).astype(np.int64)
    last = np.clip(np.ceil(np.maximum(y0, y1)), 0, rows).astype(np.int64)
    flips = np.zeros(rows * (cols + 1), np.int64)
    # some edges at a time: many long ones would take all memory
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
    """Parts of edges that cross some rows each, so many together."""
    ends = counts.cumsum()
    begin = 0
    while begin < len(counts):
        before = ends[begin] - counts[begin]
        end = max(begin + 1, int(np.searchsorted(ends, before + _CROSSINGS, "right")))
        yield slice(begin, end)
        begin = end
