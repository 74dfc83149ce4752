"""Images without pyramid levels as slides; PNG and JPEG images are decoded completely."""

from __future__ import annotations

import mmap
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import imagecodecs
import numpy as np
import numpy.typing as npt
from PIL import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from spatialdl.data.jpeg import decode_into
from spatialdl.errors import SlideError
from spatialdl.slides.reading.source import HANDLES, PixelSource

Bytes = npt.NDArray[np.uint8]

IN_MEMORY = 2**28
"""Images of more bytes than this are decoded into a temporary file."""
_COEFFICIENTS = 2**29  # bytes; decoders hold all of a progressive JPEG or interlaced PNG in memory
_END_WITHIN = 2**16  # last bytes of a file in which the end marker of a JPEG must be
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "P": 3, "RGB": 3, "RGBA": 4}  # by Pillow's mode


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


class PlainImage(PixelSource):
    """An image of one level, opened at the first read.

    Args:
        path: the file.
        header: its size and properties.
        opener: opens its pixels; may raise SlideError.
    """

    def __init__(self, path: Path, header: Header, opener: Callable[[], Pixels]) -> None:
        super().__init__()
        self.size = header.size
        self.properties = header.properties
        self.remark = header.remark
        self._path = path
        self._opener = opener
        self._pixels: Pixels | None = None
        self._failed: SlideError | None = None

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of the image, composited over white; see `PixelSource.read`."""
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


class Kind(NamedTuple):
    """A format: its name, a decoder into an array, and Pillow's reader of its header."""

    name: str
    decode: Callable[[mmap.mmap, Bytes], object]
    reader: Callable[[Path], ImageFile.ImageFile]


PNG = Kind("PNG", lambda data, out: imagecodecs.png_decode(data, out=out), PngImageFile)
JPEG = Kind("JPEG", decode_into, JpegImageFile)


class DecodedPixels:
    """The pixels of a PNG or JPEG, decoded when it is opened.

    Args:
        path: the file.
        kind: `PNG` or `JPEG`.

    Raises:
        SlideError: the file is damaged, or the temporary folder has no space for its pixels.
    """

    premultiplied = False

    def __init__(self, path: Path, kind: Kind) -> None:
        self.shape = checked_shape(path, kind)
        self._spool: IO[bytes] | None = None
        if np.prod(self.shape, dtype=float) > IN_MEMORY:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            out: Bytes = np.memmap(self._spool, np.uint8, "w+", shape=self.shape)
        else:
            out = np.empty(self.shape, np.uint8)
        self._image = out
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                kind.decode(data, out if self.shape[2] > 1 else out[..., 0])
        except (ValueError, RuntimeError, OSError) as error:
            self.close()
            raise SlideError(
                f"cannot read slide {path}: {error}; the {kind.name} is damaged, copy it again"
            ) from error

    def box(self, top: int, bottom: int, left: int, right: int) -> Bytes:
        """Return a box inside the image, (rows, cols, channels)."""
        return np.array(self._image[top:bottom, left:right])

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._image = np.empty((0, 0, 1), np.uint8)
        if self._spool is not None:
            self._spool.close()
            self._spool = None


def checked_shape(path: Path, kind: Kind) -> tuple[int, int, int]:
    """Return rows, columns and channels of an image, and check that it can be decoded.

    Raises:
        SlideError: the format is not supported, or there is not enough memory or disk space.
    """
    cannot = f"cannot open slide {path}: the {kind.name}"
    try:
        with kind.reader(path) as image:
            (cols, rows), mode, info = image.size, image.mode, image.info
            coding = str(image.tile[0][3])
        with path.open("rb") as file:
            file.seek(-min(_END_WITHIN, file.seek(0, 2)), 2)
            end = file.read()
    except (SyntaxError, OSError, ValueError, IndexError) as error:  # what Pillow raises
        raise SlideError(f"{cannot} is cut short in its header; copy it again") from error
    channels = _CHANNELS.get(mode, 0) + (mode in ("1", "L", "P", "RGB") and "transparency" in info)
    bytes_ = rows * cols * channels
    if "16" in coding:
        raise SlideError(f"{cannot} has 16 bits per channel, supported are 8; convert it to 8")
    if not channels:
        raise SlideError(f"{cannot} has the colours {mode}; convert it to RGB")
    if kind is JPEG and b"\xff\xd9" not in end:
        raise SlideError(f"{cannot} is cut short: its end is missing; copy it again")
    in_memory = 2 * bytes_ if info.get("progressive") else bytes_ if info.get("interlace") else 0
    if in_memory > _COEFFICIENTS:
        raise SlideError(
            f"{cannot} is progressive or interlaced, and decoding it needs {in_memory / 1e9:.1f} "
            f"GB of memory, more than {_COEFFICIENTS / 1e9:.1f}; convert it to a tiled TIFF"
        )
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if bytes_ > IN_MEMORY and bytes_ > free:
        raise SlideError(
            f"{cannot} needs {bytes_ / 1e9:.1f} GB when decoded, and the temporary folder "
            f"{folder} has {free / 1e9:.1f} GB free; set TMPDIR to a larger one, or convert the "
            "slide to a tiled TIFF"
        )
    return rows, cols, channels
