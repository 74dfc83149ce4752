"""Opening what may be a slide: by openslide, else as a plain image, else saying what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import openslide

from spatialdl.errors import SlideError
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.openslide_file import OpenSlideFile
from spatialdl.slides.reading.plain import is_plain, open_plain

Bytes = npt.NDArray[np.uint8]

SLIDE_SUFFIXES = (
    *(".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".ndpis", ".scn", ".svs", ".svslide"),
    *(".tif", ".tiff", ".vms", ".vmu", ".zvi"),
)
"""Of files that are slides, wherever they lie; PNG and JPEG images may be anything."""
_LFS = b"version https://git-lfs"


class Source(Protocol):
    """An open file with pixels in it, whatever reads it."""

    size: tuple[int, int]
    downsamples: tuple[float, ...]
    properties: Mapping[str, str]
    background: tuple[int, int, int]

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """A box of a level over the background, uint8 (rows, cols, 3); see `OpenSlideFile`."""

    def is_native(self, level: int) -> bool:
        """Whether a level is read without openslide."""

    def jpeg_grid(self, level: int) -> JpegGrid | None:
        """The JPEG tiles of a level as they are in the file, if that is what it has."""

    def close(self) -> None:
        """Close the file."""


def open_source(path: Path, native: bool = True) -> Source:
    """Open a slide or a plain image.

    Args:
        path: the file.
        native: read tiles without openslide where that gives the same pixels.

    Raises:
        SlideError: it cannot be read; says why.
    """
    if path.is_dir():
        raise SlideError(f"cannot open slide {path}: it is a folder")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise SlideError(f"cannot open slide {path}: there is no such file") from None
    except OSError as error:
        raise SlideError(f"cannot open slide {path}: {error.strerror}") from error
    try:
        return OpenSlideFile(path, native)
    except openslide.OpenSlideUnsupportedFormatError as error:
        if is_plain(start):
            return open_plain(path, start)
        raise SlideError(f"cannot open slide {path}: {_why_unsupported(path, start)}") from error
    except openslide.OpenSlideError as error:
        raise SlideError(
            f"cannot open slide {path}: {error}; copy it again if its size is not that of the "
            "original, else convert it to a tiled TIFF"
        ) from error


def _why_unsupported(path: Path, start: bytes) -> str:
    """The same error stands for several causes; tell them apart by how the file begins."""
    if not start:
        return "the file is empty; copy it again"
    if start.startswith(_LFS):
        return "it is a Git LFS pointer, not the slide; fetch it with `git lfs pull`"
    if b"\0" not in start and _is_text(start):
        return "it is a text file; give the slide itself"
    return "openslide does not read this format; convert it to a tiled TIFF"


def _is_text(start: bytes) -> bool:
    try:
        start[: start.rfind(b"\n") + 1 or None].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
