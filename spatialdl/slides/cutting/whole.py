"""The tissue of a slide as one image of any size: its bounding box, read by rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.reading.reader import Slide

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class WholePlan:
    """One region of a slide.

    Attributes:
        x, y: level-0 pixel of its top-left corner.
        size: its rows and columns.
        scale: level-0 pixels per pixel of the region.
    """

    x: int
    y: int
    size: tuple[int, int]
    scale: float

    @property
    def span(self) -> tuple[float, float]:
        """Level-0 rows and columns."""
        return self.size[0] * self.scale, self.size[1] * self.scale


def plan_whole(slide: Slide, plan: TilePlan) -> WholePlan | None:
    """Plan the bounding box of the tissue of a slide.

    It begins at a pixel of the level that is read, or at a tile if the level has JPEG tiles, so
    that no pixel is interpolated and no tile is cut.

    Args:
        slide: open.
        plan: of tiles, at the resolution of the region; the tissue is that of its thumbnail.

    Returns:
        The region, None if there is no tissue.
    """
    mask = plan.tissue.mask
    if not mask.any():
        return None
    grid = slide.jpeg_grid(plan.scale)
    level = slide.level(plan.scale)
    down = slide.downsamples[level]
    sides = []
    for dim in (0, 1):
        seen = np.flatnonzero(mask.any(1 - dim))
        unit = down * (1 if grid is None else grid.chunk[dim])
        first = int(seen[0] * plan.thumbnail.scale / unit) * unit
        last = end = slide.level_size(level)[dim] * down
        if seen[-1] + 1 < mask.shape[dim]:  # else up to the edge, which the mask may not reach
            last = min((seen[-1] + 1) * plan.thumbnail.scale, end)
        sides.append((round(first), max(1, int((last - first) / plan.scale))))
    (y, rows), (x, cols) = sides
    return WholePlan(x, y, (rows, cols), plan.scale)


class WholeImage:
    """A region that is read by rows: `image[row0:row1]`.

    Args:
        slide: open.
        plan: the region.
    """

    def __init__(self, slide: Slide, plan: WholePlan) -> None:
        self._slide = slide
        self._plan = plan
        self.shape = (*plan.size, 3)

    def __getitem__(self, rows: slice) -> Bytes:
        """Read rows, uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        first, last, _ = rows.indices(self.shape[0])
        plan = self._plan
        return self._slide.read_rows(plan.x, plan.y, plan.size, plan.scale, (first, last))
