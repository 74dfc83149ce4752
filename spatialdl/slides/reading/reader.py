"""Reading slides: any box at any resolution, with clear errors and no black corners."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.opening import open_source
from spatialdl.slides.reading.paths import slide_name
from spatialdl.slides.reading.resolution import (
    MPP_AT_1X,
    PLAUSIBLE_MPP,
    SAME,
    FileMpp,
    is_plausible,
    mpp_of,
    power_of,
)

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

_AT_A_TIME = 2**25  # pixels read from a level at a time
_REACH = 3  # of the filter, in pixels of the result
# pixels of a thumbnail and of level 0, the more, that are left out together
_PATCH, _PATCH_OF_SLIDE = 12, 192
_ROUNDING = 1e-6  # of a pixel
_HALF = 0.5  # of a pixel: resampling that moves none by more over the whole region is none
_FAILURES = 500  # after so many the rest of a thumbnail is not taken apart any more


class Thumbnail(NamedTuple):
    """A small picture of a slide.

    `image` is uint8 (rows, cols, 3), `missing` (rows, cols) is true where the file could not be
    read, `scale` is level-0 pixels per pixel. `empty` (rows, cols) is true where the file has no
    pixels, as between scanned parts; None where it has all.
    """

    image: Bytes
    missing: Mask
    scale: float
    empty: Mask | None = None

    @property
    def seen(self) -> Mask:
        """Where it shows the slide."""
        return ~self.missing if self.empty is None else ~(self.missing | self.empty)


class Slide:
    """A slide open for reading.

    Boxes come from the file's own tiles where that gives the pixels of openslide, else from
    openslide. Many slides may be open: those not read for long give their files back meanwhile.

    Args:
        path: any format that openslide reads, or a plain TIFF, PNG or JPEG; of a DICOM series its
            folder, one of its files, or FOLDER/UID.
        mpp: micrometres per level-0 pixel, in place of what the file says.
        native: false reads all that openslide can through openslide.

    Raises:
        SlideError: the file is missing or cannot be read as a slide; says which and why.
        ValueError: `mpp` is not between 0.05 and 20.
    """

    def __init__(
        self, path: str | os.PathLike[str], mpp: float | None = None, *, native: bool = True
    ) -> None:
        if mpp is not None and not is_plausible(mpp):
            raise ValueError(
                f"slide mpp {mpp} is not between {PLAUSIBLE_MPP[0]} and {PLAUSIBLE_MPP[1]} "
                "micrometres per pixel"
            )
        self.path = Path(path)
        self._given_mpp = mpp
        self._source = open_source(self.path, native)
        self._size = self._source.size
        self._downsamples = self._source.downsamples

    @property
    def name(self) -> str:
        """File name without its suffix; of a DICOM series that of its folder, or its UID."""
        return slide_name(self.path)

    @property
    def properties(self) -> Mapping[str, str]:
        """What the file says, by the names of openslide; a plain image says little."""
        return self._source.properties

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns at level 0."""
        return self._size

    @property
    def downsamples(self) -> tuple[float, ...]:
        """How many level-0 pixels a pixel of each level spans, along one dim."""
        return self._downsamples

    @property
    def background(self) -> tuple[int, int, int]:
        """Colour of places without pixels: what the file says, else white; can be set."""
        return self._source.background

    @background.setter
    def background(self, colour: tuple[int, int, int]) -> None:
        self._source.background = colour

    @property
    def quickhash(self) -> str:
        """What openslide takes for the identity of the slide; empty where it does not say."""
        return self._source.properties.get("openslide.quickhash-1", "")

    @property
    def scanned_from(self) -> tuple[int, int]:
        """Level-0 (x, y) where the scanned part begins, as MIRAX slides say; else (0, 0)."""
        says = [self._source.properties.get(f"openslide.bounds-{axis}", "0") for axis in "xy"]
        return (int(says[0]), int(says[1])) if all(map(str.isdecimal, says)) else (0, 0)

    @property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel.

        Raises:
            SlideError: the file says nothing, or nothing that can be right.
        """
        return self._resolution().mpp

    @property
    def known_mpp(self) -> float | None:
        """Micrometres per level-0 pixel, None where the file does not say them plausibly."""
        try:
            return self.mpp
        except SlideError:
            return None

    @property
    def objective_power(self) -> float:
        """Power of the objective: what the file says, else 10 / mpp by convention.

        Raises:
            SlideError: the file says neither.
        """
        power = power_of(self._source.properties) if self._given_mpp is None else None
        return MPP_AT_1X / self.mpp if power is None else power

    @property
    def remark(self) -> str:
        """What is odd about the file and its resolution; empty if nothing is."""
        try:
            resolution = self._resolution().remark
        except SlideError:
            resolution = ""
        return "; ".join(filter(None, (self._source.remark, resolution)))

    def level(self, scale: float) -> int:
        """The level that is read for `scale`: the coarsest that is at least as fine."""
        fine = [k for k, down in enumerate(self._downsamples) if down <= scale * (1 + SAME)]
        return max(fine, key=lambda k: self._downsamples[k], default=0)

    def level_size(self, level: int) -> tuple[int, int]:
        """Rows and columns of a level."""
        if level == 0:
            return self._size
        says = self._source.properties
        return (
            int(says[f"openslide.level[{level}].height"]),
            int(says[f"openslide.level[{level}].width"]),
        )

    def is_exact(self, scale: float, size: tuple[int, int]) -> bool:
        """Whether boxes of a region at `scale` have its very pixels, however it is divided.

        Where pixels are resampled, or lie between those of a level, they may differ by two levels
        or so of 255, as filters round.
        """
        down = self._downsamples[self.level(scale)]
        return down.is_integer() and abs(scale / down - 1) * max(size) < _HALF

    def is_native(self, scale: float) -> bool:
        """Whether reads at `scale` take the file's own tiles, without openslide."""
        return self._source.is_native(self.level(scale))

    def jpeg_grid(self, scale: float) -> JpegGrid | None:
        """The file's own JPEG tiles at `scale`, to be stored as they are.

        Returns:
            None where reads at `scale` are not taken from a level as it is, or that level is not
            of JPEG tiles whose pixels were found to be those of openslide (see `is_native`).
        """
        level = self.level(scale)
        down = self._downsamples[level]
        if abs(scale / down - 1) * max(self.size) / down >= _HALF:
            return None
        return self._source.jpeg_grid(level)

    def scale(self, mpp: float) -> float:
        """Level-0 pixels per pixel at a resolution; that of a level within 1 % of it.

        So tiles wanted at 0.5 of a slide that has 0.499 are its own pixels, not resampled ones.
        """
        return self.nearest(mpp / self.mpp)

    def nearest(self, scale: float) -> float:
        """The scale of a level within 1 % of `scale`, else `scale`."""
        nearest = min(self._downsamples, key=lambda down: abs(down - scale))
        return nearest if abs(nearest / scale - 1) < SAME else scale

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
        return self.read_rows(x, y, size, scale, (0, size[0]), again=again)

    def read_rows(
        self,
        x: int,
        y: int,
        size: tuple[int, int],
        scale: float,
        rows: tuple[int, int],
        *,
        again: bool = True,
    ) -> Bytes:
        """Rows of a region, as they are in it: without seams where several are put together.

        Args:
            x, y, size, scale, again: of the region; see `read_scaled`.
            rows: the first, and the one behind the last.

        Returns:
            uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        return self.read_box(x, y, size, scale, (*rows, 0, size[1]), again=again)

    def read_box(
        self,
        x: int,
        y: int,
        size: tuple[int, int],
        scale: float,
        box: tuple[int, int, int, int],
        *,
        again: bool = True,
    ) -> Bytes:
        """A box of a region, as it is in it: without seams where several are put together.

        See `is_exact`.

        Args:
            x, y, size, scale, again: of the region; see `read_scaled`.
            box: half-open (row0, row1, col0, col1) of the region, not empty.

        Returns:
            uint8 (row1 - row0, col1 - col0, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        return self._box(x, y, size, scale, box, partial(self._source.read, again=again))

    def _box(
        self,
        x: int,
        y: int,
        size: tuple[int, int],
        scale: float,
        box: tuple[int, int, int, int],
        read: Callable[[int, int, int, tuple[int, int]], Bytes],
    ) -> Bytes:
        first, last, left, right = box
        level = self.level(scale)
        down = self._downsamples[level]
        factor, cols = scale / down, right - left
        if abs(factor - 1) * max(size) < _HALF:
            place = round(x + left * down), round(y + first * down)
            return read(*place, level, (last - first, cols))
        # some at a time: a slide without levels is not read into memory whole
        step = max(1, int(_AT_A_TIME / (factor * max(1.0, cols * factor))))
        col0, col1 = _reach(left, right, factor, size[1])
        parts = []
        for row in range(first, last, step):
            count = min(step, last - row)
            row0, row1 = _reach(row, row + count, factor, size[0])
            place = round(x + col0 * down), round(y + row0 * down)
            pixels = read(*place, level, (row1 - row0, col1 - col0))
            across = left * factor - col0, right * factor - col0
            along = row * factor - row0, (row + count) * factor - row0
            inside = (across[0], along[0], across[1], along[1])
            parts.append(_resampled(pixels, inside, (count, cols)))
        return np.concatenate(parts)

    def thumbnail(self, scale: float) -> Thumbnail:
        """The whole slide at `scale` level-0 pixels per pixel; parts may be missing in it.

        Its last row and column may end beyond the slide; they show what is inside.
        """
        found = self._thumbnail(scale)
        if not self._source.is_patchy:
            return found
        # what has no pixels follows the background
        before = self.background
        other = tuple(255 * (colour < 128) for colour in before)
        try:
            self.background = other[0], other[1], other[2]
            changes = np.abs(self._thumbnail(scale).image.astype(np.int16) - found.image)
        finally:
            self.background = before
        most = np.abs(np.subtract(other, before))
        return found._replace(empty=(2 * changes > most).all(-1) & ~found.missing)

    def _thumbnail(self, scale: float) -> Thumbnail:
        rows, cols = (ceil(length / scale - _ROUNDING) for length in self.size)
        size = rows, cols
        thumbnail = Thumbnail(np.empty((*size, 3), np.uint8), np.zeros(size, bool), scale)
        failures = 0
        boxes = [(0, size[0], 0, size[1])]
        while boxes:
            row0, row1, col0, col1 = box = boxes.pop()
            place, part = np.s_[row0:row1, col0:col1], (row1 - row0, col1 - col0)
            x, y = round(col0 * scale), round(row0 * scale)
            try:
                whole = (0, part[0], 0, part[1])
                thumbnail.image[place] = self._box(x, y, part, scale, whole, self._read_inside)
            except SlideError:
                failures += 1
                if max(part) > max(_PATCH, _PATCH_OF_SLIDE / scale) and failures < _FAILURES:
                    boxes.extend(_quarters(box))
                    continue
                thumbnail.image[place] = self._source.background
                thumbnail.missing[place] = True
        return thumbnail

    def _read_inside(self, x: int, y: int, level: int, size: tuple[int, int]) -> Bytes:
        """A box of a level; what lies beyond its last row and column repeats these."""
        (height, width), down = self.level_size(level), self._downsamples[level]
        rows, y = _inside(y, down, height, size[0])
        cols, x = _inside(x, down, width, size[1])
        pixels = self._source.read(x, y, level, (rows, cols), again=False)
        if (rows, cols) == size:
            return pixels
        return np.pad(pixels, ((0, size[0] - rows), (0, size[1] - cols), (0, 0)), "edge")

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> Self:
        """The slide itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        self.close()

    def _resolution(self) -> FileMpp:
        if self._given_mpp is not None:
            return FileMpp(self._given_mpp, "")
        return mpp_of(self._source.properties, self.path)


def _quarters(box: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    row0, row1, col0, col1 = box
    rows, cols = (row0, (row0 + row1) // 2, row1), (col0, (col0 + col1) // 2, col1)
    halves = [(*down, *across) for down in pairwise(rows) for across in pairwise(cols)]
    return [part for part in halves if part[0] < part[1] and part[2] < part[3]]


def _inside(start: int, down: float, length: int, wanted: int) -> tuple[int, int]:
    """Pixels of a level, of `length`, that there are from a level-0 place on; at least the last.

    Returns:
        How many, up to those wanted, and the place where they begin.
    """
    first = ceil(start / down - _ROUNDING)
    if first < length:
        return min(wanted, length - first), start
    return 1, round((length - 1) * down)


def _reach(first: int, last: int, factor: float, length: int) -> tuple[int, int]:
    """Pixels of a level that the filter looks at for some of the result, along one dim."""
    margin = ceil(_REACH * max(1.0, factor)) + 1
    return (
        max(0, floor(first * factor) - margin),
        min(ceil(length * factor), ceil(last * factor) + margin),
    )


def _resampled(
    pixels: Bytes, box: tuple[float, float, float, float], size: tuple[int, int]
) -> Bytes:
    """Bring a box (left, top, right, bottom; may begin and end within a pixel) to `size`.

    Antialiased; pixels beside the box count where they are in reach of the filter.
    """
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.LANCZOS, box))
