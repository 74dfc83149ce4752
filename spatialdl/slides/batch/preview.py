"""The stitched preview of a slide: its written tiles, each at its place."""

from __future__ import annotations

from math import ceil, floor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.data.saving import replacing

Bytes = npt.NDArray[np.uint8]

_NOTHING = 208  # grey, to distinguish missing tiles from white glass
_QUALITY = 85
_SAMPLES = 4  # rows of a tile averaged into one; more take time without visible effect


class Small(NamedTuple):
    """A shrunk tile, uint8 (rows, cols, 3), and the level-0 `rows` and `cols` it spans."""

    pixels: Bytes
    rows: float
    cols: float


class Preview:
    """A picture of a slide that tiles are pasted into.

    Its memory is bounded by `longest`. Where tiles overlap, the last one pasted is visible.

    Args:
        size: rows and columns of the slide at level 0.
        longest: pixels of the longer side of the picture; small slides are not enlarged.
    """

    def __init__(self, size: tuple[int, int], longest: int = 2048) -> None:
        if min(size) < 1 or longest < 1:
            raise ValueError(f"preview needs size and longest >= 1, got {size} and {longest}")
        self._zoom = min(1.0, longest / max(size))
        rows, cols = (max(1, _rounded(length * self._zoom)) for length in size)
        self._canvas = np.full((rows, cols, 3), _NOTHING, np.uint8)

    @property
    def scale(self) -> float:
        """Level-0 pixels per pixel of the picture."""
        return 1 / self._zoom

    @property
    def pixels(self) -> Bytes:
        """The picture so far, uint8 (rows, cols, 3)."""
        return self._canvas

    def shrunk(self, image: Bytes, rows: float, cols: float) -> Small:
        """Shrink a tile for `paste`; runs in any process, so that only small tiles are sent.

        Args:
            image: the tile, uint8 (rows, cols, 3).
            rows: level-0 rows that it spans.
            cols: level-0 columns.
        """
        size = self._length(rows), self._length(cols)
        return Small(_averaged(image, size), rows, cols)

    def paste(self, x: float, y: float, small: Small) -> None:
        """Paste a tile at level-0 column `x` and row `y`, cropped to the slide."""
        top, down = self._place(y, small.rows, self._canvas.shape[0])
        left, across = self._place(x, small.cols, self._canvas.shape[1])
        pixels = small.pixels
        # a place may be one pixel longer, by rounding: repeat the last pixel
        short = [
            max(0, n) for n in (down.stop - top - len(pixels), across.stop - left - pixels.shape[1])
        ]
        if any(short):
            pixels = np.pad(pixels, ((0, short[0]), (0, short[1]), (0, 0)), "edge")
        inside = (
            slice(down.start - top, down.stop - top),
            slice(across.start - left, across.stop - left),
        )
        self._canvas[down, across] = pixels[inside]

    def reveal(self, image: Bytes, x: float, y: float, rows: float, cols: float) -> None:
        """Copy a span of a picture of the slide, at level-0 column `x` and row `y`.

        Args:
            image: the whole slide, of the shape of `pixels`.
            x, y, rows, cols: the span, in level-0 pixels.
        """
        _, down = self._place(y, rows, image.shape[0])
        _, across = self._place(x, cols, image.shape[1])
        self._canvas[down, across] = image[down, across]

    def save(self, path: Path) -> None:
        """Write the picture, atomically: a PNG if its suffix is .png, else a JPEG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if path.suffix.lower() == ".png" else "JPEG"
        with replacing(path) as file:
            Image.fromarray(self._canvas).save(file, kind, quality=_QUALITY)

    def _length(self, span: float) -> int:
        """The largest number of pixels of a span at any place."""
        return max(1, ceil(span * self._zoom))

    def _place(self, start: float, span: float, length: int) -> tuple[int, slice]:
        """Where a span begins in the picture, and the rows or columns it covers."""
        # the end of a tile is rounded like the start of its neighbour, so that there are no gaps
        first, last = _rounded(start * self._zoom), _rounded((start + span) * self._zoom)
        begin = min(max(0, first), length)
        return first, slice(begin, max(begin, min(max(first + 1, last), length)))


def preview_name(slide: str) -> str:
    """File name of the preview of a slide, beside its picture."""
    return f"{slide}.stitched.jpg"


def _rounded(number: float) -> int:
    """Round half up: rounding half to even would leave gaps."""
    return floor(number + 0.5)


def _averaged(image: Bytes, size: tuple[int, int]) -> Bytes:
    """The image at a smaller size, each pixel the mean of an area (a sample of its rows)."""
    factor = len(image) // size[0]
    if factor > 1:
        # Pillow alone takes up to twice as long, mostly to copy the image
        whole = len(image) // factor * factor
        step = -(-factor // _SAMPLES) | 1  # odd, or every second row might never be sampled
        starts = range(0, factor, step)
        total = image[:whole:factor].astype(np.uint16)
        for start in starts[1:]:
            total += image[start:whole:factor]
        total += len(starts) // 2
        total //= len(starts)
        image = total.astype(np.uint8)
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BOX))
