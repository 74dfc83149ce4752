"""Opening of slides: by openslide, else as a plain image, else with an error that says why.

Files opened by openslide are read from their own tiles where the pixels are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openslide
from PIL import Image

from spatialdl.common.files import file_status
from spatialdl.data.jpeg import JpegStream
from spatialdl.errors import SlideError
from spatialdl.slides.reading import native as native_tiles
from spatialdl.slides.reading import plain_image, plain_tiff
from spatialdl.slides.reading.native import JpegGrid
from spatialdl.slides.reading.paths import is_dicom, series_at, slides_among
from spatialdl.slides.reading.plain_image import Header, PlainImage
from spatialdl.slides.reading.source import HANDLES, PixelSource

_LFS, _HDF5 = b"version https://git-lfs", b"\x89HDF"
_NAMING, _LONGEST = (".mrxs", ".vms", ".vmu", ".ndpis"), 256  # formats, characters of a name
_NAMED = 3  # slides of a folder listed in a message
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_START, JPEG_START = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PLAIN_SUFFIXES = (".png", ".jpg", ".jpeg")
_ROUNDING = 1  # accepted difference of colour levels between native tiles and openslide

Bytes = npt.NDArray[np.uint8]


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
    _check_references(path, first)
    if first.suffix.lower() == ".vsi":
        raise SlideError(
            f"cannot open slide {path}: the pixels of a .vsi lie in .ets files beside it, which "
            "are not supported; export it as a pyramidal OME-TIFF, e.g. by bfconvert or QuPath"
        )
    try:
        source = OpenSlideFile(first, native, path)
        of_any_tiff = source.properties.get("openslide.vendor") == "generic-tiff"
        if of_any_tiff and (lost := plain_tiff.what_is_lost(first)):
            source.close()
            raise SlideError(f"cannot open slide {path}: {lost}")
        return source
    except openslide.OpenSlideUnsupportedFormatError as error:
        if start.startswith((*TIFF_STARTS, PNG_START, JPEG_START)):
            return _open_plain(path, start)
        raise SlideError(f"cannot open slide {path}: {_why_unsupported(path, start)}") from error
    except openslide.OpenSlideError as error:
        raise SlideError(
            f"cannot open slide {path}: {error}; copy it again if its size is not that of the "
            "original, else convert it to a tiled TIFF"
        ) from error


def _check_references(path: Path, first: Path) -> None:
    """Check the files that the text files of a MIRAX, VMS, VMU or NDPIS slide name."""
    suffix, folder = first.suffix.lower(), first.parent
    if suffix not in _NAMING:
        return
    if suffix == ".mrxs":
        folder, first = first.with_suffix(""), first.with_suffix("") / "Slidedat.ini"
    try:
        text = first.read_text(encoding="utf-8", errors="replace") if first.is_file() else ""
        for name in re.findall(r"(?m)^[^;#=\n]+=[ \t]*(.*\S)", text):
            if len(name) < _LONGEST and (folder / name).exists():
                file_status(folder, name)
    except (OSError, ValueError) as error:
        raise SlideError(f"cannot open slide {path}: {error}") from error


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


def _open_plain(path: Path, start: bytes) -> PlainImage:
    """Open a TIFF, PNG or JPEG, given its first bytes; see `open_source`."""
    if start.startswith(TIFF_STARTS):
        header = plain_tiff.header(path)
        return PlainImage(path, header, lambda: plain_tiff.TiffPixels(path))
    kind = plain_image.PNG if start.startswith(PNG_START) else plain_image.JPEG
    rows, cols, _ = plain_image.checked_shape(path, kind)
    return PlainImage(path, Header((rows, cols), {}), lambda: plain_image.DecodedPixels(path, kind))


class OpenSlideFile(PixelSource):
    """A slide opened by openslide.

    The first read of a level compares a few of its tiles with openslide to decide whether they
    can be decoded natively; see `spatialdl.slides.reading.native`.

    Args:
        path: the file.
        native: decode tiles without openslide where that gives the same pixels.
        slide: path used in messages; the file if None.

    Raises:
        openslide.OpenSlideError: the file cannot be opened.
    """

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
        self._levels = native_tiles.tile_levels(path, self.properties) if native else {}

    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of a level; see `PixelSource.read`."""
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
                raise self._damaged(x, y, level, error) from error

    def _from_tiles(self, x: int, y: int, level: int, size: tuple[int, int]) -> Bytes | None:
        # openslide interpolates between pixels of the level
        col, row = x / self.downsamples[level], y / self.downsamples[level]
        if not (col.is_integer() and row.is_integer() and self.is_native(level)):
            return None
        try:
            return self._opened_tiles().read(level, int(row), int(col), size, self.background)
        except ValueError as error:  # openslide reads some damaged streams, and tells nobody
            raise self._damaged(x, y, level, error) from error

    def _damaged(self, x: int, y: int, level: int, error: Exception) -> SlideError:
        return SlideError(
            f"cannot read slide {self._slide} at x={x}, y={y} (level {level}): {error}; "
            "the file is damaged there"
        )

    def _same_pixels(self, level: int) -> bool:
        """Whether openslide gives the same pixels in the first, middle, last and largest tile."""
        place = self._levels[level]
        count = len(place.lengths)
        probes = {0, int(place.lengths.argmax()), count - 1, count // 2}
        compared = 0
        for number in sorted(probes & set(range(count))):
            (row, col), (th, tw) = place.corner(number), place.tile
            size = min(th, place.size[0] - row), min(tw, place.size[1] - col)
            try:
                tile = self._opened_tiles().read(level, row, col, size, self.background)
            except ValueError:
                continue
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
            raise self._damaged(x, y, level, error) from error
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
