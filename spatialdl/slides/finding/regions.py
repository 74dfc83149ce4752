"""Annotated regions of a slide, their rasterisation, and masks of their classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError

Ring = npt.NDArray[np.float64]  # (corners, 2): level-0 x, y; the last is joined to the first
Mask = npt.NDArray[np.bool_]

_CROSSINGS = 2**20  # intersections of edges and rows computed at a time
NOTHING = 0  # value of a class map in no region
BACKGROUND = "background"


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


def class_list(names: Iterable[str]) -> list[str]:
    """Return the classes of masks: background first, then the classes of regions, sorted."""
    return [BACKGROUND, *sorted({*names} - {BACKGROUND})]


class RegionMask:
    """A mask that is drawn by rows: `mask[row0:row1]`.

    A pixel belongs to the smallest region that contains its centre. In no region it is background;
    in a region without a class it is unlabelled.

    Args:
        regions: in level-0 pixels.
        classes: class names, see `class_list`; values are indices into them.
        corner: level-0 x, y of the top-left corner of the mask.
        size: rows and columns.
        scale: level-0 pixels per pixel.

    Raises:
        SlideError: there are more classes than values of a mask.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        classes: Sequence[str],
        corner: tuple[float, float],
        size: tuple[int, int],
        scale: float,
    ) -> None:
        if len(classes) > UNLABELLED:
            raise SlideError(
                f"the annotations have {len(classes)} classes, a mask supports {UNLABELLED}"
            )
        x, y = corner
        self._regions = [region.moved((-x, -y)) for region in regions]
        values = [
            UNLABELLED if name is None else classes.index(name) for name in class_names(regions)
        ]
        self._values = np.array([classes.index(BACKGROUND), *values], np.uint8)
        self.shape, self._scale = size, scale

    def __getitem__(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Draw rows, uint8 (rows, columns)."""
        first, last, _ = rows.indices(self.shape[0])
        up = (0.0, -first * self._scale)
        moved = [region.moved(up) for region in self._regions]
        return self._values[class_map(moved, (last - first, self.shape[1]), self._scale)]
