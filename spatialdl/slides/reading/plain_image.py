"""An image without pyramid levels as a slide."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.errors import SlideError
from spatialdl.slides.reading.handles import HANDLES, ReopenedFile

Bytes = npt.NDArray[np.uint8]

_WHITE = (255, 255, 255)


class Pixels(Protocol):
    """The pixels of an open image.

    `shape` is rows, columns and channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.
    `premultiplied`: colours are already multiplied by alpha.
    """

    shape: tuple[int, int, int]
    premultiplied: bool

    def box(self, top: int, bottom: int, left: int, right: int) -> Bytes:
        """Return a box inside the image, (rows, cols, channels)."""

    def close(self) -> None:
        """Release files and memory."""


class Header(NamedTuple):
    """Rows and columns, properties and remark of an image, read without its pixels."""

    size: tuple[int, int]
    properties: Mapping[str, str]
    remark: str = ""


class PlainImage(ReopenedFile):
    """An image of one level, opened at the first read.

    Args:
        path: the file.
        header: its size and properties.
        opener: opens its pixels; may raise SlideError.
    """

    downsamples: tuple[float, ...] = (1.0,)
    is_patchy = False  # no box has places without pixels

    def __init__(self, path: Path, header: Header, opener: Callable[[], Pixels]) -> None:
        super().__init__()
        self.background: tuple[int, int, int] = _WHITE
        self.size = header.size
        self.properties = header.properties
        self.remark = header.remark
        self._path = path
        self._opener = opener
        self._pixels: Pixels | None = None
        self._failed: SlideError | None = None

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of the image, composited over white; see `OpenSlideFile.read`."""
        top, left = max(y, 0), max(x, 0)
        bottom, right = min(y + size[0], self.size[0]), min(x + size[1], self.size[1])
        out = np.full((*size, 3), self.background, np.uint8)
        if top >= bottom or left >= right:
            return out
        with self._lock:
            HANDLES.used(self)
            pixels = self._opened()
            try:
                box = pixels.box(top, bottom, left, right)
            except (ValueError, RuntimeError, OSError, struct.error) as error:
                raise SlideError(
                    f"cannot read slide {self._path} at x={x}, y={y}: {error}; "
                    "the file is damaged there"
                ) from error
        out[top - y : bottom - y, left - x : right - x] = _over_white(box, pixels.premultiplied)
        return out

    def is_native(self, level: int) -> bool:
        """Return true: openslide is not used."""
        return True

    def jpeg_grid(self, level: int) -> None:
        """Return None: supported only for slides opened by openslide."""

    def _opened(self) -> Pixels:
        if self._failed is not None:  # decoding again would fail again
            raise self._failed
        if self._pixels is None:
            try:
                self._pixels = self._opener()
            except SlideError as error:
                self._failed = error
                raise
        return self._pixels

    def _let_go(self) -> None:
        if self._pixels is not None:
            self._pixels.close()
            self._pixels = None


def _over_white(pixels: Bytes, premultiplied: bool) -> Bytes:
    channels = pixels.shape[2]
    if channels in (1, 3):
        return pixels
    colour, alpha = pixels[..., :-1].astype(np.uint16), pixels[..., -1:].astype(np.uint16)
    if not premultiplied:
        colour = (colour * alpha + 127) // 255
    return np.asarray(np.minimum(colour + (255 - alpha), 255), np.uint8)
