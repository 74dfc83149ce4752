"""Overviews and tiles of the slides of feature files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.predicting.slide_paths import slide_paths
from spatialdl.slides.reading.paths import slide_aliases
from spatialdl.slides.reading.reader import Slide

_OVERVIEW = 500  # longer side in pixels
_TILE = 160

Picture = npt.NDArray[np.uint8]


class SlidePictures:
    """Slides by the names of their feature files.

    Args:
        paths: slides, folders and patterns; may be empty.

    Attributes:
        unreadable: error messages of unreadable slides, by name.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        found = slide_paths(list(paths)) if paths else []
        self._paths = {name: path for path in found for name in reversed(slide_aliases(path))}
        self.unreadable: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def path(self, name: str) -> Path | None:
        return self._paths.get(name)

    def overview(self, name: str) -> tuple[Picture, float] | None:
        """Overview of a slide, and level-0 pixels per pixel; None if missing or unreadable."""
        path = self.path(name)
        if path is None:
            return None
        try:
            with Slide(path) as slide:
                found = slide.thumbnail(max(1.0, max(slide.size) / _OVERVIEW))
                return found.image, found.scale
        except SlideError as error:
            self.unreadable[name] = str(error)
            return None

    def tile(self, name: str, place: tuple[int, int], span: float) -> Picture | None:
        """Tile at level-0 x and y, `span` level-0 pixels wide; None if missing or unreadable."""
        path = self.path(name)
        if path is None:
            return None
        side = int(min(_TILE, max(1.0, span)))
        try:
            with Slide(path) as slide:
                return slide.read_scaled(*place, (side, side), max(1.0, span / side))
        except SlideError as error:
            self.unreadable[name] = str(error)
            return None
