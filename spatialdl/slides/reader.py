"""Reading slides: openslide, with clear errors, a checked resolution and no black corners."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import openslide
from PIL import Image

from spatialdl.errors import SlideError

Bytes = npt.NDArray[np.uint8]

PLAUSIBLE_MPP = (0.05, 20.0)
_SAME = 0.01  # sizes or resolutions that differ by less than this part are the same
_AT_A_TIME = 2**25  # pixels read from a level at a time
_PATCH = 12  # pixels of a thumbnail that are given up together
_FAILURES = 500  # after so many the rest of a thumbnail is not taken apart any more
_LFS = b"version https://git-lfs"


class Thumbnail(NamedTuple):
    """A small picture of a slide.

    `image` is uint8 (rows, cols, 3), `missing` (rows, cols) is true where the file could not be
    read, `scale` is level-0 pixels per pixel.
    """

    image: Bytes
    missing: npt.NDArray[np.bool_]
    scale: float


class Slide:
    """A slide open for reading.

    Args:
        path: any format that openslide reads.
        mpp: micrometres per level-0 pixel, in place of what the file says.

    Raises:
        SlideError: the file is missing or cannot be read as a slide; says which and why.
        ValueError: `mpp` is not between 0.05 and 20.
    """

    def __init__(self, path: str | os.PathLike[str], mpp: float | None = None) -> None:
        if mpp is not None and not _plausible(mpp):
            raise ValueError(
                f"slide mpp {mpp} is not between {PLAUSIBLE_MPP[0]} and {PLAUSIBLE_MPP[1]} "
                "micrometres per pixel"
            )
        self.path = Path(path)
        self._given_mpp = mpp
        self._handle = _opened(self.path)
        # asked now: a handle that failed once does not even answer these
        self._size = self._handle.dimensions[::-1]
        self._downsamples = tuple(float(factor) for factor in self._handle.level_downsamples)
        self._properties = dict(self._handle.properties)
        self._background = _background(self._properties)
        self._spoiled = False

    @property
    def name(self) -> str:
        """File name without its suffix."""
        return self.path.stem

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns at level 0."""
        return self._size

    @property
    def downsamples(self) -> tuple[float, ...]:
        """How many level-0 pixels a pixel of each level spans, along one dim."""
        return self._downsamples

    @property
    def scanned_from(self) -> tuple[int, int]:
        """Level-0 (x, y) where the scanned part begins, as MIRAX slides say; else (0, 0)."""
        says = [self._properties.get(f"openslide.bounds-{axis}", "0") for axis in "xy"]
        return (int(says[0]), int(says[1])) if all(map(str.isdecimal, says)) else (0, 0)

    @property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel.

        Raises:
            SlideError: the file says nothing, or nothing that can be right.
        """
        if self._given_mpp is not None:
            return self._given_mpp
        return self._mpp_of_file()

    def scale(self, mpp: float) -> float:
        """Level-0 pixels per pixel at a resolution; that of a level within 1 % of it.

        So tiles wanted at 0.5 of a slide that has 0.499 are its own pixels, not resampled ones.
        """
        scale = mpp / self.mpp
        nearest = min(self._downsamples, key=lambda down: abs(down - scale))
        return nearest if abs(nearest / scale - 1) < _SAME else scale

    def read(self, x: int, y: int, size: tuple[int, int], mpp: float) -> Bytes:
        """Read a region at a wanted resolution.

        The level used is the coarsest that is at least as fine as wanted; what remains is
        resampled with antialiasing. Places outside the slide have the background colour.

        Args:
            x: level-0 column of the top-left corner; may be negative.
            y: level-0 row of it.
            size: rows and columns wanted.
            mpp: micrometres per pixel wanted.

        Returns:
            uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there; other regions can still be read.
        """
        return self.read_scaled(x, y, size, self.scale(mpp))

    def read_scaled(
        self, x: int, y: int, size: tuple[int, int], scale: float, *, again: bool = True
    ) -> Bytes:
        """As `read`, at `scale` level-0 pixels per pixel, whatever the slide's resolution.

        A read that fails is tried again with a fresh handle, unless `again` is false.
        """
        rows, cols = size
        level = self._level(scale)
        factor = scale / self._downsamples[level]
        if abs(factor - 1) * max(size) < 0.5:  # less than half a pixel over the whole region
            return self._pixels(x, y, level, size, again)
        # some rows at a time: a slide without levels is not read into memory whole
        step = max(1, int(_AT_A_TIME / (factor * max(1.0, cols * factor))))
        parts = []
        for row in range(0, rows, step):
            down, across = min(step, rows - row) * factor, cols * factor
            y_part = round(y + row * scale)
            pixels = self._pixels(x, y_part, level, (ceil(down), ceil(across)), again)
            parts.append(_resampled(pixels, (down, across), (min(step, rows - row), cols)))
        return np.concatenate(parts)

    def thumbnail(self, scale: float) -> Thumbnail:
        """The whole slide at `scale` level-0 pixels per pixel; parts may be missing in it."""
        height, width = self.size
        size = max(1, round(height / scale)), max(1, round(width / scale))
        thumbnail = Thumbnail(np.empty((*size, 3), np.uint8), np.zeros(size, bool), scale)
        failures = 0
        boxes = [(0, size[0], 0, size[1])]
        while boxes:
            row0, row1, col0, col1 = box = boxes.pop()
            place, part = np.s_[row0:row1, col0:col1], (row1 - row0, col1 - col0)
            x, y = round(col0 * scale), round(row0 * scale)
            try:
                thumbnail.image[place] = self.read_scaled(x, y, part, scale, again=False)
            except SlideError:
                failures += 1
                if max(part) > _PATCH and failures < _FAILURES:
                    boxes.extend(_quarters(box))
                    continue
                thumbnail.image[place] = self._background
                thumbnail.missing[place] = True
        return thumbnail

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def __enter__(self) -> Self:
        """The slide itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def _level(self, scale: float) -> int:
        fine = [k for k, down in enumerate(self._downsamples) if down <= scale * (1 + _SAME)]
        return max(fine, key=lambda k: self._downsamples[k], default=0)

    def _pixels(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        try:
            return self._read_once(x, y, level, size)
        except openslide.OpenSlideError as error:
            if again:
                return self._pixels(x, y, level, size, again=False)
            raise SlideError(
                f"cannot read slide {self.path} at x={x}, y={y} (level {level}): {error}; "
                "the file is damaged there"
            ) from error

    def _read_once(self, x: int, y: int, level: int, size: tuple[int, int]) -> Bytes:
        if self._spoiled:
            self._handle.close()
            self._handle = _opened(self.path)
            self._spoiled = False
        try:
            image = self._handle.read_region((x, y), level, (size[1], size[0]))
        except openslide.OpenSlideError:
            self._spoiled = True  # after one error every read of this handle fails
            raise
        return _composited(image, self._background)

    def _mpp_of_file(self) -> float:
        says = [self._properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
        if None in says:
            raise SlideError(
                f"slide {self.path} does not say its micrometres per pixel; "
                "give them with --slide-mpp"
            )
        try:
            x, y = (float(str(value)) for value in says)
        except ValueError:
            x, y = 0.0, 0.0
        if not (_plausible(x) and _plausible(y)):
            raise SlideError(
                f"slide {self.path} says {_short(says[0])} x {_short(says[1])} micrometres per "
                f"pixel, which is not between {PLAUSIBLE_MPP[0]:g} and {PLAUSIBLE_MPP[1]:g}; "
                "give the right value with --slide-mpp"
            )
        if abs(x - y) > _SAME * max(x, y):
            raise SlideError(
                f"slide {self.path} says {x:g} micrometres per pixel across and {y:g} down, "
                "and pixels that are not square cannot be tiled; if that is wrong, give the "
                "right value with --slide-mpp"
            )
        return (x + y) / 2


def _short(number: str | None) -> str:
    try:
        return f"{float(str(number)):.4g}"
    except ValueError:
        return repr(number)


def _plausible(mpp: float) -> bool:
    return PLAUSIBLE_MPP[0] <= mpp <= PLAUSIBLE_MPP[1]


def _quarters(box: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    row0, row1, col0, col1 = box
    rows, cols = (row0, (row0 + row1) // 2, row1), (col0, (col0 + col1) // 2, col1)
    halves = [(*down, *across) for down in pairwise(rows) for across in pairwise(cols)]
    return [part for part in halves if part[0] < part[1] and part[2] < part[3]]


def _opened(path: Path) -> openslide.OpenSlide:
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
        return openslide.OpenSlide(path)
    except openslide.OpenSlideUnsupportedFormatError as error:
        raise SlideError(f"cannot open slide {path}: {_why_unsupported(path, start)}") from error
    except openslide.OpenSlideError as error:
        raise SlideError(
            f"cannot open slide {path}: {error}; copy it again if its size is not that of the "
            "original, else convert it to a tiled TIFF"
        ) from error


def _why_unsupported(path: Path, start: bytes) -> str:
    """The same error stands for several causes; tell them apart by how the file begins."""
    size = path.stat().st_size
    if not start:
        return "the file is empty; copy it again"
    if start.startswith(_LFS):
        return "it is a Git LFS pointer, not the slide; fetch it with `git lfs pull`"
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return (
            f"the TIFF is cut short or of a kind that openslide does not read ({size} bytes); "
            "compare its size with the original, or convert it to a tiled TIFF"
        )
    if b"\0" not in start and _is_text(start):
        return "it is a text file; give the slide itself"
    return "openslide does not read this format; convert it to a tiled TIFF"


def _is_text(start: bytes) -> bool:
    try:
        start[: start.rfind(b"\n") + 1 or None].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _background(properties: Mapping[str, str]) -> tuple[int, int, int]:
    """The colour of glass: what the file says, else white."""
    text = properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "")
    try:
        value = bytes.fromhex(text.removeprefix("#"))
    except ValueError:
        value = b""
    return (value[0], value[1], value[2]) if len(value) == 3 else (255, 255, 255)


def _resampled(pixels: Bytes, part: tuple[float, float], size: tuple[int, int]) -> Bytes:
    """Bring the first `part` (rows, cols; may end within a pixel) to `size`, antialiased."""
    box = (0.0, 0.0, part[1], part[0])
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.LANCZOS, box))


def _composited(image: Image.Image, background: tuple[int, int, int]) -> Bytes:
    """RGB over the background; `convert("RGB")` alone would make missing pixels black."""
    if image.getchannel("A").getextrema() == (255, 255):
        return np.asarray(image.convert("RGB"))
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image.getchannel("A"))
    return np.asarray(canvas)
