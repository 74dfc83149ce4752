"""PNG and JPEG images, decoded completely: into memory, or large ones into a temporary file."""

from __future__ import annotations

import mmap
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import imagecodecs
import numpy as np
import numpy.typing as npt

from spatialdl.data.jpeg import decode_into
from spatialdl.errors import SlideError

Bytes = npt.NDArray[np.uint8]

IN_MEMORY = 2**28
"""Images of more bytes than this are decoded into a temporary file."""
_COEFFICIENTS = 2**29  # bytes; decoders hold all of a progressive JPEG or interlaced PNG in memory
_END_WITHIN = 2**16  # last bytes of a file in which the end marker of a JPEG must be


class Kind(NamedTuple):
    """A format: its name, a decoder into an array, and a reader of the shape in the header."""

    name: str
    decode: Callable[[mmap.mmap, Bytes], None]
    shape: Callable[[IO[bytes]], tuple[int, int, int]]


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
        self.shape = _shape(path, kind)
        self._spool: IO[bytes] | None = None
        rows, cols, channels = self.shape
        bytes_ = rows * cols * channels
        out: Bytes
        if bytes_ <= IN_MEMORY:
            out = np.empty(self.shape, np.uint8)
        else:
            _check_room(path, bytes_)
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            out = np.memmap(self._spool, np.uint8, "w+", shape=self.shape)
        self._image = out
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                kind.decode(data, out if channels > 1 else out[..., 0])
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


def checked_size(path: Path, kind: Kind) -> tuple[int, int]:
    """Return the rows and columns of an image, and check that it can be decoded.

    Raises:
        SlideError: the format is not supported, or there is not enough memory or disk space.
    """
    rows, cols, channels = _shape(path, kind)
    if rows * cols * channels > IN_MEMORY:
        _check_room(path, rows * cols * channels)
    return rows, cols


def _shape(path: Path, kind: Kind) -> tuple[int, int, int]:
    try:
        with path.open("rb") as file:
            rows, cols, channels = kind.shape(file)
    except (struct.error, IndexError):
        raise SlideError(
            f"cannot open slide {path}: the {kind.name} is cut short in its header; copy it again"
        ) from None
    except ValueError as error:
        raise SlideError(f"cannot open slide {path}: {error}") from None
    if min(rows, cols) < 1:
        raise SlideError(f"cannot open slide {path}: its header has {rows} x {cols} pixels")
    return rows, cols, channels


def _check_room(path: Path, bytes_: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if bytes_ > free:
        raise SlideError(
            f"cannot open slide {path}: it needs {bytes_ / 1e9:.1f} GB when decoded, and the "
            f"temporary folder {folder} has {free / 1e9:.1f} GB free; set TMPDIR to a larger one, "
            "or convert the slide to a tiled TIFF"
        )


_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by colour type
_PALETTE, _BEFORE_PIXELS = 3, 2**16


def _decode_png(data: mmap.mmap, out: Bytes) -> None:
    imagecodecs.png_decode(data, out=out)


def _png_shape(file: IO[bytes]) -> tuple[int, int, int]:
    start = file.read(33)
    cols, rows, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", start[16:29])
    if bits == 16:
        raise ValueError("the PNG has 16 bits per channel, supported are 8; convert it to 8")
    if colour not in _PNG_CHANNELS:
        raise ValueError(f"the PNG has the invalid colour type {colour}; copy it again")
    channels = _PNG_CHANNELS[colour] + _has_transparent_colour(file) * (1 if colour < 4 else 0)
    if interlaced:
        _check_memory("interlaced PNG", rows * cols * channels)
    return rows, cols, channels


def _has_transparent_colour(file: IO[bytes]) -> bool:
    """Whether a tRNS chunk comes before the pixels."""
    while True:
        length, name = struct.unpack(">I4s", file.read(8))
        if name in (b"IDAT", b"IEND"):
            return False
        if name == b"tRNS":
            return True
        file.seek(length + 4, 1)


_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_READ_FRAMES, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC2


def _jpeg_shape(file: IO[bytes]) -> tuple[int, int, int]:
    file.seek(2)
    while True:
        marker, length = struct.unpack(">HH", file.read(4))
        if marker >> 8 != 0xFF:
            raise ValueError("the JPEG is damaged in its header; copy it again")
        if marker & 0xFF in _FRAMES:
            break
        file.seek(length - 2, 1)
    bits, rows, cols, components = struct.unpack(">BHHB", file.read(6))
    if marker & 0xFF not in _READ_FRAMES or bits != 8:
        raise ValueError(f"the JPEG has {bits} bits or is lossless; convert it to 8 bits")
    if components not in (1, 3):
        raise ValueError(f"the JPEG has {components} channels (CMYK); convert it to RGB")
    if marker & 0xFF == _PROGRESSIVE:
        _check_memory("progressive JPEG", 2 * rows * cols * components)
    file.seek(0, 2)
    file.seek(-min(_END_WITHIN, file.tell()), 2)
    if b"\xff\xd9" not in file.read():
        raise ValueError("the JPEG is cut short: its end is missing; copy it again")
    return rows, cols, components


def _check_memory(what: str, bytes_: int) -> None:
    if bytes_ > _COEFFICIENTS:
        raise ValueError(
            f"decoding this {what} needs {bytes_ / 1e9:.1f} GB of memory, more than "
            f"{_COEFFICIENTS / 1e9:.1f}; convert it to a tiled TIFF"
        )


PNG = Kind("PNG", _decode_png, _png_shape)
JPEG = Kind("JPEG", decode_into, _jpeg_shape)
