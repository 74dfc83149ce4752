"""Segmentation mask of a whole region from annotated regions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError
from spatialdl.slides.finding.regions import Region, class_map, class_names

BACKGROUND = "background"


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
