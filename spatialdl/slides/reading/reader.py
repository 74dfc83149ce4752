"""Slide reader: any box at any resolution; places without pixels have the background colour."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading.native import JpegGrid
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
# smallest side of an unreadable box of a thumbnail that is bisected: the larger of these, in
# pixels of the thumbnail and of level 0
_PATCH, _PATCH_OF_SLIDE = 12, 192
_ROUNDING = 1e-6  # of a pixel
_HALF = 0.5  # of a pixel: no resampling if it would move every pixel of the region by less
_FAILURES = 500  # failed reads of a thumbnail after which unreadable boxes are not bisected


class Thumbnail(NamedTuple):
    """A downscaled picture of a whole slide.

    `image` is uint8 (rows, cols, 3), `missing` (rows, cols) is true where the file could not be
    read, `scale` is level-0 pixels per pixel. `empty` (rows, cols) is true where the file has no
    pixels, such as between scanned parts; None if it has all.
    """

    image: Bytes
    missing: Mask
    scale: float
    empty: Mask | None = None

    @property
    def seen(self) -> Mask:
        """Mask of pixels that are neither missing nor empty."""
        return ~self.missing if self.empty is None else ~(self.missing | self.empty)


class ScannedPart(NamedTuple):
    """The box of a slide that QuPath shows, and from whose corner its coordinates count.

    In level-0 pixels of OpenSlide, which counts from the corner of the whole slide.
    """

    x: int
    y: int
    rows: int
    cols: int

    def of_thumbnail(self, whole: Thumbnail) -> Thumbnail:
        """The part of a slide's thumbnail."""
        row, col = (round(start / whole.scale) for start in (self.y, self.x))
        rows, cols = (max(1, round(length / whole.scale)) for length in (self.rows, self.cols))
        place = np.s_[row : row + rows, col : col + cols]
        empty = None if whole.empty is None else whole.empty[place]
        return whole._replace(image=whole.image[place], missing=whole.missing[place], empty=empty)


class Slide:
    """A slide open for reading.

    Boxes are decoded from the file's own tiles where that gives the pixels of openslide, else by
    openslide. Many slides may be open: the files of the least recently read ones are closed and
    reopened on demand.

    Args:
        path: any format that openslide supports, or a plain TIFF, PNG or JPEG; for a DICOM series
            its folder, one of its files, or FOLDER/UID.
        mpp: micrometres per level-0 pixel, overrides the file's metadata.
        native: false reads with openslide all files that it supports.

    Attributes:
        size: rows and columns at level 0.
        downsamples: level-0 pixels per pixel of each level, along one dim.
        properties: metadata of the file, by openslide's names; a plain image has little.

    Raises:
        SlideError: the file is missing or cannot be read as a slide.
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
        self.size = self._source.size
        self.downsamples = self._source.downsamples
        self.properties = self._source.properties

    @property
    def name(self) -> str:
        """File name without its suffix; for a DICOM series its folder's name, or its UID."""
        return slide_name(self.path)

    @property
    def background(self) -> tuple[int, int, int]:
        """Colour of places without pixels: from the file's metadata, else white; can be set."""
        return self._source.background

    @background.setter
    def background(self, colour: tuple[int, int, int]) -> None:
        self._source.background = colour

    @property
    def quickhash(self) -> str:
        """Openslide's hash of the slide; empty if there is none."""
        return self.properties.get("openslide.quickhash-1", "")

    @property
    def scanned(self) -> ScannedPart:
        """The scanned part, e.g. of MIRAX and SCN slides; the whole slide without bounds."""
        known = {
            name: int(text)
            for name in ("x", "y", "width", "height")
            if (text := self.properties.get(f"openslide.bounds-{name}", "")).isdecimal()
        }
        rows, cols = self.size
        x, y = (known["x"], known["y"]) if {"x", "y"} <= known.keys() else (0, 0)
        width, height = known.get("width", cols), known.get("height", rows)
        return ScannedPart(x, y, min(height, rows - y), min(width, cols - x))

    @property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel.

        Raises:
            SlideError: the file has no resolution, or an implausible one.
        """
        return self._resolution().mpp

    @property
    def known_mpp(self) -> float | None:
        """Micrometres per level-0 pixel; None if the file has no plausible value."""
        try:
            return self.mpp
        except SlideError:
            return None

    @property
    def objective_power(self) -> float:
        """Objective power: from the file's metadata, else 10 / mpp by convention.

        Raises:
            SlideError: the file has neither.
        """
        power = power_of(self.properties) if self._given_mpp is None else None
        return MPP_AT_1X / self.mpp if power is None else power

    @property
    def remark(self) -> str:
        """Irregularities of the file and its resolution; empty if there are none."""
        try:
            resolution = self._resolution().remark
        except SlideError:
            resolution = ""
        return "; ".join(filter(None, (self._source.remark, resolution)))

    def level(self, scale: float) -> int:
        """Return the level to read for `scale`: the coarsest one that is at least as fine."""
        fine = [k for k, down in enumerate(self.downsamples) if down <= scale * (1 + SAME)]
        return max(fine, key=lambda k: self.downsamples[k], default=0)

    def level_size(self, level: int) -> tuple[int, int]:
        """Return the rows and columns of a level."""
        if level == 0:
            return self.size
        rows, cols = (self.properties[f"openslide.level[{level}].{k}"] for k in ("height", "width"))
        return int(rows), int(cols)

    def is_exact(self, scale: float, size: tuple[int, int]) -> bool:
        """Whether boxes of a region at `scale` have the same pixels, however it is divided.

        Pixels that are resampled, or lie between those of a level, may differ by about two levels
        of 255, as filters round.
        """
        down = self.downsamples[self.level(scale)]
        return down.is_integer() and abs(scale / down - 1) * max(size) < _HALF

    def is_native(self, scale: float) -> bool:
        """Whether reads at `scale` decode the file's own tiles, without openslide."""
        return self._source.is_native(self.level(scale))

    def jpeg_grid(self, scale: float) -> JpegGrid | None:
        """Return the file's own JPEG tiles at `scale`, for storage without re-encoding.

        Returns:
            None if reads at `scale` need resampling, or the level does not consist of JPEG tiles
            with the same pixels as openslide (see `is_native`).
        """
        level = self.level(scale)
        down = self.downsamples[level]
        if abs(scale / down - 1) * max(self.size) / down >= _HALF:
            return None
        return self._source.jpeg_grid(level)

    def scale(self, mpp: float) -> float:
        """Return level-0 pixels per pixel at a resolution, rounded to a level within 1 %.

        So tiles at 0.5 of a slide with 0.499 have its own pixels, without resampling.
        """
        return self.nearest(mpp / self.mpp)

    def nearest(self, scale: float) -> float:
        """Return the scale of a level within 1 % of `scale`, else `scale`."""
        nearest = min(self.downsamples, key=lambda down: abs(down - scale))
        return nearest if abs(nearest / scale - 1) < SAME else scale

    def read(self, x: int, y: int, size: tuple[int, int], mpp: float) -> Bytes:
        """Read a region at a given resolution.

        Reads the coarsest level that is at least as fine and resamples it with antialiasing.
        Places outside the slide have the background colour.

        Args:
            x: level-0 column of the top-left corner; may be negative.
            y: level-0 row of the corner.
            size: rows and columns of the result.
            mpp: micrometres per pixel of the result.

        Returns:
            uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there; other regions can still be read.
        """
        return self.read_scaled(x, y, size, self.scale(mpp))

    def read_scaled(self, x: int, y: int, size: tuple[int, int], scale: float) -> Bytes:
        """Read a region as `read` does, at `scale` level-0 pixels per pixel."""
        return self.read_box(x, y, size, scale, (0, size[0], 0, size[1]))

    def read_box(
        self,
        x: int,
        y: int,
        size: tuple[int, int],
        scale: float,
        box: tuple[int, int, int, int],
    ) -> Bytes:
        """Read a box of a region; boxes of a region can be joined without seams.

        See `is_exact`.

        Args:
            x, y, size, scale: of the region; see `read_scaled`.
            box: half-open (row0, row1, col0, col1) of the region, not empty.

        Returns:
            uint8 (row1 - row0, col1 - col0, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        return self._box(x, y, size, scale, box, partial(self._source.read, again=True))

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
        down = self.downsamples[level]
        factor, cols = scale / down, right - left
        if abs(factor - 1) * max(size) < _HALF:
            place = round(x + left * down), round(y + first * down)
            return read(*place, level, (last - first, cols))
        # in steps of rows: a slide without levels does not fit into memory
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
        """Read the whole slide at `scale` level-0 pixels per pixel; parts may be missing.

        The last row and column may end beyond the slide; they show the part inside.
        """
        thumbnail = self._thumbnail(scale)
        if not self._source.is_patchy:
            return thumbnail
        # empty places are those that change with the background colour
        before = self.background
        other = tuple(255 * (colour < 128) for colour in before)
        try:
            self.background = other[0], other[1], other[2]
            changes = np.abs(self._thumbnail(scale).image.astype(np.int16) - thumbnail.image)
        finally:
            self.background = before
        most = np.abs(np.subtract(other, before))
        return thumbnail._replace(empty=(2 * changes > most).all(-1) & ~thumbnail.missing)

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
        """A box of a level, padded beyond its last row and column by repeating these."""
        (height, width), down = self.level_size(level), self.downsamples[level]
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
        """Return the slide itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        self.close()

    def _resolution(self) -> FileMpp:
        if self._given_mpp is not None:
            return FileMpp(self._given_mpp, "")
        return mpp_of(self.properties, self.path)


def _quarters(box: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    row0, row1, col0, col1 = box
    rows, cols = (row0, (row0 + row1) // 2, row1), (col0, (col0 + col1) // 2, col1)
    halves = [(*down, *across) for down in pairwise(rows) for across in pairwise(cols)]
    return [part for part in halves if part[0] < part[1] and part[2] < part[3]]


def _inside(start: int, down: float, length: int, wanted: int) -> tuple[int, int]:
    """Clip a range that begins at level-0 `start` to a level of `length` pixels, to >= 1 pixel.

    Returns:
        The number of pixels, at most `wanted`, and the level-0 place where they begin.
    """
    first = ceil(start / down - _ROUNDING)
    if first < length:
        return min(wanted, length - first), start
    return 1, round((length - 1) * down)


def _reach(first: int, last: int, factor: float, length: int) -> tuple[int, int]:
    """Range of level pixels within reach of the filter for a range of the result, in one dim."""
    margin = ceil(_REACH * max(1.0, factor)) + 1
    return (
        max(0, floor(first * factor) - margin),
        min(ceil(length * factor), ceil(last * factor) + margin),
    )


def _resampled(
    pixels: Bytes, box: tuple[float, float, float, float], size: tuple[int, int]
) -> Bytes:
    """Resample a box (left, top, right, bottom; in fractions of pixels) to `size`.

    Antialiased; the filter includes pixels outside of the box within its reach.
    """
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.LANCZOS, box))
