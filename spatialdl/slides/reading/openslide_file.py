"""Files opened by openslide, read from their own tiles where the pixels are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openslide
from PIL import Image

from spatialdl.data.jpeg import JpegStream
from spatialdl.errors import SlideError
from spatialdl.slides.reading import native as native_tiles
from spatialdl.slides.reading.handles import HANDLES, ReopenedFile
from spatialdl.slides.reading.jpeg_grid import JpegGrid

Bytes = npt.NDArray[np.uint8]

_ROUNDING = 1  # accepted difference of colour levels between native tiles and openslide


class OpenSlideFile(ReopenedFile):
    """A slide opened by openslide.

    The first read of a level compares a few of its tiles with openslide to decide whether they
    can be decoded natively; see `spatialdl.slides.reading.native`.

    Args:
        path: the file.
        native: decode tiles without openslide where that gives the same pixels.
        slide: path used in messages; the file if None.

    Attributes:
        background: colour of places without pixels.
        is_patchy: whether some box read so far had such places.

    Raises:
        openslide.OpenSlideError: the file cannot be opened.
    """

    remark = ""

    def __init__(self, path: Path, native: bool = True, slide: Path | None = None) -> None:
        super().__init__()
        self._path = path
        self._slide = slide or path
        self._handle: openslide.OpenSlide | None = None
        self._spoiled = False
        self._tiles: native_tiles.NativeTiles | None = None
        self._native_levels: dict[int, bool] = {}
        handle = self._opened()
        # read now: a handle that failed once does not return these either
        self.size: tuple[int, int] = handle.dimensions[::-1]
        self.downsamples = tuple(float(factor) for factor in handle.level_downsamples)
        self.properties: Mapping[str, str] = dict(handle.properties)
        self.background = _background(self.properties)
        self.is_patchy = False
        self._levels = native_tiles.tile_levels(path, self.properties) if native else {}

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of a level over the background.

        Args:
            x: level-0 column of the top-left corner, may be negative.
            y: level-0 row of the corner.
            level: of the slide.
            size: rows and columns, in pixels of the level.
            again: repeat a failed read once, with a new handle.

        Returns:
            uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there.
        """
        with self._lock:
            HANDLES.used(self)
            pixels = self._from_tiles(x, y, level, size)
            return self._from_openslide(x, y, level, size, again) if pixels is None else pixels

    def is_native(self, level: int) -> bool:
        """Whether the tiles of a level are decoded without openslide."""
        with self._lock:
            HANDLES.used(self)
            if level not in self._native_levels:
                self._native_levels[level] = level in self._levels and self._same_pixels(level)
            return self._native_levels[level]

    def jpeg_grid(self, level: int) -> JpegGrid | None:
        """Return the JPEG tiles of a level, not decoded; None if it is not read from JPEG tiles."""
        if not self.is_native(level):
            return None
        place, down = self._levels[level], self.downsamples[level]
        if place.decoder.jpeg is None:
            return None
        shape = (*place.size, place.decoder.jpeg.channels)
        return JpegGrid(shape, place.tile, down, lambda row, col: self._jpeg(level, row, col))

    def _jpeg(self, level: int, row: int, col: int) -> JpegStream:
        number = row * self._levels[level].across + col
        with self._lock:
            HANDLES.used(self)
            try:
                return self._opened_tiles().stream(level, number)
            except ValueError as error:
                top, left = self._levels[level].corner(number)
                x, y = (round(at * self.downsamples[level]) for at in (left, top))
                raise SlideError(
                    f"cannot read slide {self._slide} at x={x}, y={y} (level {level}): {error}; "
                    "the file is damaged there"
                ) from error

    def _from_tiles(self, x: int, y: int, level: int, size: tuple[int, int]) -> Bytes | None:
        # openslide interpolates between pixels of the level
        col, row = x / self.downsamples[level], y / self.downsamples[level]
        if not (col.is_integer() and row.is_integer() and self.is_native(level)):
            return None
        return self._opened_tiles().read(level, int(row), int(col), size, self.background)

    def _same_pixels(self, level: int) -> bool:
        """Whether openslide gives the same pixels in the first, middle, last and largest tile."""
        place = self._levels[level]
        count = len(place.lengths)
        probes = {0, int(place.lengths.argmax()), count - 1, count // 2}
        compared = 0
        for number in sorted(probes & set(range(count))):
            (row, col), (th, tw) = place.corner(number), place.tile
            size = min(th, place.size[0] - row), min(tw, place.size[1] - col)
            tile = self._opened_tiles().read(level, row, col, size, self.background)
            if tile is None:
                continue
            expected = self._region_of_level(level, row, col, size)
            if expected is None:
                continue
            if np.abs(tile.astype(np.int16) - expected).max() > _ROUNDING:
                return False
            compared += 1
        return compared > 0

    def _region_of_level(
        self, level: int, row: int, col: int, size: tuple[int, int]
    ) -> Bytes | None:
        """Pixels of a level from openslide; None if unreadable or not at a level-0 pixel."""
        down = self.downsamples[level]
        x, y = round(col * down), round(row * down)
        if (x / down, y / down) != (col, row):
            return None
        try:
            return self._from_openslide(x, y, level, size, again=False)
        except SlideError:
            return None

    def _from_openslide(
        self, x: int, y: int, level: int, size: tuple[int, int], again: bool
    ) -> Bytes:
        try:
            image = self._opened().read_region((x, y), level, (size[1], size[0]))
        except openslide.OpenSlideError as error:
            self._spoiled = True  # after an error every read with this handle fails
            if again:
                return self._from_openslide(x, y, level, size, again=False)
            raise SlideError(
                f"cannot read slide {self._slide} at x={x}, y={y} (level {level}): {error}; "
                "the file is damaged there"
            ) from error
        self.is_patchy |= image.getchannel("A").getextrema() != (255, 255)
        return composited(image, self.background)

    def _opened(self) -> openslide.OpenSlide:
        if self._spoiled and self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._handle is None:
            HANDLES.used(self)
            self._handle = openslide.OpenSlide(self._path)
            self._spoiled = False
        return self._handle

    def _opened_tiles(self) -> native_tiles.NativeTiles:
        if self._tiles is None:
            self._tiles = native_tiles.NativeTiles(self._path, self._levels)
        return self._tiles

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._tiles is not None:
            self._tiles.close()
            self._tiles = None


def _background(properties: Mapping[str, str]) -> tuple[int, int, int]:
    """The background colour in the file's metadata, else white."""
    text = properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "")
    try:
        value = bytes.fromhex(text.removeprefix("#"))
    except ValueError:
        value = b""
    return (value[0], value[1], value[2]) if len(value) == 3 else (255, 255, 255)


def composited(image: Image.Image, background: tuple[int, int, int]) -> Bytes:
    """Composite RGBA over the background; `convert("RGB")` would make missing pixels black."""
    if image.getchannel("A").getextrema() == (255, 255):
        return np.asarray(image.convert("RGB"))
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image.getchannel("A"))
    return np.asarray(canvas)
