"""Opening of slides: by openslide, else as a plain image, else with an error that says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import openslide

from spatialdl.errors import SlideError
from spatialdl.slides.reading import plain_image, plain_tiff
from spatialdl.slides.reading.dicom import is_dicom
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.openslide_file import OpenSlideFile
from spatialdl.slides.reading.paths import series_at, slides_among
from spatialdl.slides.reading.plain_image import Header, PlainImage

Bytes = npt.NDArray[np.uint8]

_LFS, _HDF5 = b"version https://git-lfs", b"\x89HDF"
_NAMED = 3  # slides of a folder listed in a message
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_START, JPEG_START = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PLAIN_SUFFIXES = (".png", ".jpg", ".jpeg")


class PixelSource(Protocol):
    """An open file with pixels; `remark` describes its irregularities."""

    size: tuple[int, int]
    downsamples: tuple[float, ...]
    properties: Mapping[str, str]
    background: tuple[int, int, int]
    remark: str
    is_patchy: bool

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of a level over the background, uint8 (rows, cols, 3)."""

    def is_native(self, level: int) -> bool:
        """Whether a level is read without openslide."""

    def jpeg_grid(self, level: int) -> JpegGrid | None:
        """Return the JPEG tiles of a level, not decoded; None if it has none."""

    def close(self) -> None:
        """Close the file."""


def open_source(path: Path, native: bool = True) -> PixelSource:
    """Open a slide or a plain image.

    Args:
        path: the file, or a DICOM series: its folder, or FOLDER/UID.
        native: read tiles without openslide where that gives the same pixels.

    Raises:
        SlideError: the file cannot be read.
    """
    series = None if path.is_file() else series_at(path)
    first = path if series is None else series.files[0]
    if first.is_dir():
        raise SlideError(f"cannot open slide {path}: it is a folder{_slides_in(path)}")
    try:
        with first.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise SlideError(f"cannot open slide {path}: there is no such file") from None
    except OSError as error:
        raise SlideError(f"cannot open slide {path}: {error.strerror}") from error
    try:
        return OpenSlideFile(first, native, path)
    except openslide.OpenSlideUnsupportedFormatError as error:
        if is_plain(start):
            return open_plain(path, start)
        raise SlideError(f"cannot open slide {path}: {_why_unsupported(path, start)}") from error
    except openslide.OpenSlideError as error:
        raise SlideError(
            f"cannot open slide {path}: {error}; copy it again if its size is not that of the "
            "original, else convert it to a tiled TIFF"
        ) from error


def _slides_in(folder: Path) -> str:
    slides = slides_among(folder, [path for path in folder.iterdir() if path.is_file()])
    if not slides:
        return " without slides"
    more = f" and {len(slides) - _NAMED} more" if len(slides) > _NAMED else ""
    return f"; give one of its slides: {', '.join(map(str, slides[:_NAMED]))}{more}"


def _why_unsupported(path: Path, start: bytes) -> str:
    """Why openslide does not support a file, from its first bytes."""
    if not start:
        return "the file is empty; copy it again"
    if start.startswith(_LFS):
        return "it is a Git LFS pointer, not the slide; fetch it with `git lfs pull`"
    if start.startswith(_HDF5):
        return "it is an HDF5 file, not a slide; give the folder of its data set, or use `h5ls -rv`"
    if b"\0" not in start and _is_text(start):
        return "it is a text file; give the slide itself"
    if is_dicom(start):
        return "it is a DICOM file, but not a whole-slide image that openslide supports"
    return "openslide does not support this format; convert it to a tiled TIFF"


def _is_text(start: bytes) -> bool:
    try:
        start[: start.rfind(b"\n") + 1 or None].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def is_plain(start: bytes) -> bool:
    """Whether a file with these first bytes is a TIFF, PNG or JPEG."""
    return start.startswith((*TIFF_STARTS, PNG_START, JPEG_START))


def open_plain(path: Path, start: bytes) -> PlainImage:
    """Open a TIFF, PNG or JPEG.

    Args:
        path: the file.
        start: its first bytes.

    Raises:
        SlideError: the file is truncated, not supported, or needs too much memory.
    """
    if start.startswith(TIFF_STARTS):
        header = plain_tiff.header(path)
        return PlainImage(path, header, lambda: plain_tiff.TiffPixels(path))
    kind = plain_image.PNG if start.startswith(PNG_START) else plain_image.JPEG
    rows, cols, _ = plain_image.checked_shape(path, kind)
    return PlainImage(path, Header((rows, cols), {}), lambda: plain_image.DecodedPixels(path, kind))
