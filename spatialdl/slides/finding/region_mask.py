"""Annotated regions as the mask of a whole region: a class for each of its pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError
from spatialdl.slides.finding.regions import Region, class_map, class_names

BACKGROUND = "background"


def class_list(found: Iterable[str]) -> list[str]:
    """The classes of masks: that of pixels in no region, then the others by their names."""
    return [BACKGROUND, *sorted({*found} - {BACKGROUND})]


class RegionMask:
    """A mask as something that gives its rows: `mask[row0:row1]`.

    A pixel is in a region if its centre is, in the smallest of several. In none it is background;
    in one without a class nobody knows what it is.

    Args:
        regions: in level-0 pixels.
        classes: that values are indices into, see `class_list`.
        corner: level-0 x, y of its top-left corner.
        size: rows and columns.
        scale: level-0 pixels per pixel.

    Raises:
        SlideError: there are more classes than a mask can tell.
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
                f"the annotations have {len(classes)} classes, a mask can tell {UNLABELLED}"
            )
        x, y = corner
        self._regions = [region.moved((-x, -y)) for region in regions]
        values = [
            UNLABELLED if name is None else classes.index(name) for name in class_names(regions)
        ]
        self._values = np.array([classes.index(BACKGROUND), *values], np.uint8)
        self.shape, self._scale = size, scale

    def __getitem__(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Those rows, uint8 (rows, columns)."""
        first, last, _ = rows.indices(self.shape[0])
        up = (0.0, -first * self._scale)
        moved = [region.moved(up) for region in self._regions]
        return self._values[class_map(moved, (last - first, self.shape[1]), self._scale)]
