"""Decoding of a TIFF slide's own tiles, several times as fast as openslide.

Supports JPEG of 8-bit grey or colour, and Aperio's JPEG 2000 of RGB, for levels that match exactly
one page of the file. Openslide reads all other levels, and every tile that is missing. A tile that
does not decode is an error: libjpeg conceals damage in a JPEG stream and only warns; simplejpeg
turns each warning into an error, openslide only those before the last row of pixels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile

from spatialdl.data import jpeg
from spatialdl.data.jpeg import EncodedImage, JpegStream, checked

Bytes = npt.NDArray[np.uint8]
Background = tuple[int, int, int]
Slices = tuple[slice, slice]

_VENDORS = ("aperio", "generic-tiff")  # formats with one page per level
_CACHE = 2**25  # bytes of decoded tiles cached: two rows of 256-pixel tiles of most slides
_LARGEST_TILE = 2**24  # pixels
_CONTIGUOUS = 1
_SIDES = ("height", "width")

# warnings of tifffile are irrelevant: openslide decides whether a file is valid
logging.getLogger("tifffile").addHandler(logging.NullHandler())


class TileLevel(NamedTuple):
    """Layout of the tiles of a level in the file.

    `size` and `tile` are (rows, cols) of the level and of its tiles; tiles are numbered row by
    row, `across` per row, each with its offset and length in bytes.
    """

    size: tuple[int, int]
    tile: tuple[int, int]
    across: int
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    decoder: Decoder

    def corner(self, number: int) -> tuple[int, int]:
        """Return the row and column of the top-left pixel of a tile."""
        return number // self.across * self.tile[0], number % self.across * self.tile[1]


class NativeTiles:
    """Decoder of the tiles of a slide, with a cache.

    Args:
        path: the TIFF.
        levels: the supported levels, by number.
    """

    def __init__(self, path: Path, levels: Mapping[int, TileLevel]) -> None:
        self.levels = dict(levels)
        self._path = path
        self._file = path.open("rb", buffering=0)
        largest = max((3 * int(np.prod(level.tile)) for level in self.levels.values()), default=1)
        self._tile = lru_cache(max(1, _CACHE // largest))(self._decoded)

    def read(
        self, level: int, row: int, col: int, size: tuple[int, int], background: Background
    ) -> Bytes | None:
        """Read a box of a level; `background` outside of the level.

        Returns:
            uint8 (rows, cols, 3); None if a tile in it is missing, or the level is not supported.

        Raises:
            ValueError: a tile is damaged.
        """
        if level not in self.levels:
            return None
        place = self.levels[level]
        (height, width), (th, tw) = place.size, place.tile
        top, bottom = max(row, 0), min(row + size[0], height)
        left, right = max(col, 0), min(col + size[1], width)
        if (
            size == place.tile
            and row % th == col % tw == 0
            and (bottom - top, right - left) == size
        ):
            return self._decoded(level, row // th * place.across + col // tw)
        box = np.empty((*size, 3), np.uint8)
        if (bottom - top, right - left) != size:
            box[:] = background
        for i, j, to, of in tiles_under((top, bottom, left, right), place.tile):
            tile = self._tile(level, i * place.across + j)
            if tile is None:
                return None
            box[top - row :, left - col :][to] = tile[of]
        return box

    def stream(self, level: int, number: int) -> JpegStream:
        """Return a tile as a complete JPEG stream, checked for damage.

        Raises:
            ValueError: the tile is missing, damaged or not a JPEG.
        """
        place = self.levels[level]
        if place.decoder.jpeg is None:
            raise ValueError("the tile is not a JPEG")
        if not place.lengths[number]:
            raise ValueError("the tile is missing")
        whole, channels = place.decoder.jpeg
        return checked(whole(self._stored(level, number)), (*place.tile, channels))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._tile.cache_clear()

    def _decoded(self, level: int, number: int) -> Bytes | None:
        place = self.levels[level]
        if not place.lengths[number]:
            return None
        try:
            tile = place.decoder.decode(self._stored(level, number))
        except RuntimeError as error:  # of imagecodecs
            raise ValueError(str(error)) from error
        return tile if tile.shape == (*place.tile, 3) else None

    def _stored(self, level: int, number: int) -> bytes:
        place = self.levels[level]
        if place.offsets[number] + place.lengths[number] > os.fstat(self._file.fileno()).st_size:
            raise ValueError("the tile extends beyond the end of the file")
        # pread, since forked processes share the position in the file
        return os.pread(self._file.fileno(), int(place.lengths[number]), int(place.offsets[number]))


def tiles_under(
    box: tuple[int, int, int, int], tile: tuple[int, int]
) -> Iterator[tuple[int, int, Slices, Slices]]:
    """Iterate over the tiles that a box overlaps.

    Args:
        box: half-open (top, bottom, left, right); may be empty.
        tile: rows and columns of a tile.

    Yields:
        Row and column of a tile in the grid, and the overlap as slices of the box and of the tile.
    """
    (top, bottom, left, right), (high, wide) = box, tile
    if top >= bottom or left >= right:
        return
    for i in range(top // high, -(-bottom // high)):
        for j in range(left // wide, -(-right // wide)):
            y0, y1 = max(i * high, top), min((i + 1) * high, bottom)
            x0, x1 = max(j * wide, left), min((j + 1) * wide, right)
            to = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
            of = slice(y0 - i * high, y1 - i * high), slice(x0 - j * wide, x1 - j * wide)
            yield i, j, to, of


def tile_levels(path: Path, properties: Mapping[str, str]) -> dict[int, TileLevel]:
    """Find the levels of a slide that can be read from their tiles.

    Args:
        path: the file.
        properties: its openslide properties.
    """
    if properties.get("openslide.vendor") not in _VENDORS:
        return {}
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = [page for page in tiff.pages if isinstance(page, tifffile.TiffPage)]
            return _levels_of(pages, properties)
    except Exception:  # tifffile raises many kinds; openslide has opened the file and reads it
        return {}


def _levels_of(
    pages: list[tifffile.TiffPage], properties: Mapping[str, str]
) -> dict[int, TileLevel]:
    tiled = [page for page in pages if page.is_tiled]
    aperio = properties["openslide.vendor"] == "aperio"
    levels: dict[int, TileLevel] = {}
    for level in range(int(properties["openslide.level-count"])):
        size, tile = (
            tuple(int(properties[f"openslide.level[{level}].{what}{side}"]) for side in _SIDES)
            for what in ("", "tile-")
        )
        matches = [page for page in tiled if (page.imagelength, page.imagewidth) == size]
        if len(matches) != 1 or (matches[0].tilelength, matches[0].tilewidth) != tile:
            continue
        place = _level_of(matches[0])
        if place is not None:
            levels[level] = place
        if aperio and not all(matches[0].databytecounts):
            # openslide fills missing tiles from the previous level, in all further levels too
            levels.pop(level, None)
            break
    return levels


def _level_of(page: tifffile.TiffPage) -> TileLevel | None:
    bits = {page.bitspersample} if isinstance(page.bitspersample, int) else set(page.bitspersample)
    plain = (
        bits == {8}
        and page.dtype == np.uint8
        and page.planarconfig == _CONTIGUOUS
        and page.imagedepth == 1
        and not page.extrasamples
        and page.fillorder == 1
        and int(page.tags.valueof("Orientation", 1)) == 1
        and page.tilelength * page.tilewidth <= _LARGEST_TILE
    )
    decoder = decoder_of(
        int(page.compression), int(page.photometric), page.samplesperpixel, page.jpegtables
    )
    across = -(-page.imagewidth // page.tilewidth)
    count = across * -(-page.imagelength // page.tilelength)
    if (
        not plain
        or decoder is None
        or not len(page.dataoffsets) == len(page.databytecounts) == count
    ):
        return None
    return TileLevel(
        (page.imagelength, page.imagewidth),
        (page.tilelength, page.tilewidth),
        across,
        np.array(page.dataoffsets, np.int64),
        np.array(page.databytecounts, np.int64),
        decoder,
    )


JPEG, APERIO_RGB = 7, 33005  # of the TIFF tag Compression
GREY, RGB, YCBCR = 1, 2, 6  # of PhotometricInterpretation
_START = b"\xff\xd8"
# the Adobe marker, whose last byte selects RGB (0) or YCbCr (1) in libjpeg
_ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"


class WholeJpeg(NamedTuple):
    """Conversion of a stored tile to a complete JPEG, which any decoder reads correctly.

    `whole` inserts the shared tables and the marker of the colour space; it raises ValueError if
    the data is not a JPEG. `channels` is 1 for grey, else 3.
    """

    whole: Callable[[bytes], bytes]
    channels: int


class Decoder(NamedTuple):
    """Decoder for the tiles of one level.

    `decode` takes a stored tile and returns uint8 (rows, cols, 3), or raises. `jpeg` is None if the
    tiles are not JPEG.
    """

    decode: Callable[[bytes], Bytes]
    jpeg: WholeJpeg | None = None


def decoder_of(
    compression: int, photometric: int, samples: int, tables: bytes | None
) -> Decoder | None:
    """Choose the decoder of a page; None if only openslide can decode it.

    Args:
        compression, photometric, samples: TIFF tags of the page.
        tables: its JPEGTables, shared by abbreviated streams.
    """
    if samples != (1 if photometric == GREY else 3):
        return None
    if compression == JPEG and photometric in (GREY, RGB, YCBCR):
        return _jpeg(photometric, tables)
    if compression == APERIO_RGB and photometric in (RGB, YCBCR):
        return Decoder(lambda data: _three(imagecodecs.jpeg2k_decode(data)))
    return None


def _jpeg(photometric: int, tables: bytes | None) -> Decoder:
    # order: start marker, Adobe marker, tables without start and end markers, data of the tile
    colours = b"" if photometric == GREY else _ADOBE + bytes([int(photometric == YCBCR)])
    head = _START + colours + (tables[2:-2] if tables else b"")

    def whole(data: bytes) -> bytes:
        if data[:2] != _START:
            raise ValueError(f"not a JPEG: first bytes are {data[:2].hex()}")
        return head + data[2:]

    channels = 1 if photometric == GREY else 3
    return Decoder(lambda data: jpeg.decode_colours(whole(data), 3), WholeJpeg(whole, channels))


def _three(pixels: Bytes) -> Bytes:
    """Repeat grey values to RGB; other arrays must be uint8 (rows, cols, 3)."""
    if pixels.dtype == np.uint8 and pixels.ndim == 2:
        return np.repeat(pixels[..., None], 3, 2)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"decoded to {pixels.dtype} {pixels.shape}, expected uint8, 3 channels")
    return pixels


class JpegGrid(EncodedImage):
    """The tiles of a level stored as JPEG, for `ShardWriter.add`.

    ::

        grid = slide.jpeg_grid(scale)
        if grid is not None:
            writer.add(grid.box(0, 512, 256, 1024), slide=slide.name, xy=(256, 0))

    Tiles at the right and bottom edge of the level are complete, padded by the scanner.

    Args:
        shape: rows, columns and channels (1 for grey JPEGs, else 3), in pixels of the level.
        chunk: rows and columns of a tile.
        downsample: level-0 pixels per pixel.
        stream: returns the tile at a row and column of the level's grid, or raises SlideError.
        first: row and column of the first tile in the level's grid.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        chunk: tuple[int, int],
        downsample: float,
        stream: Callable[[int, int], JpegStream],
        first: tuple[int, int] = (0, 0),
    ) -> None:
        self.shape = shape
        self.chunk = chunk
        self.downsample = downsample
        self._stream = stream
        self._first = first

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.shape[0] // self.chunk[0]), -(-self.shape[1] // self.chunk[1])

    def encoded(self, row: int, col: int) -> JpegStream:
        """Return a tile by row and column of the grid: a complete JPEG, checked for damage.

        Raises:
            SlideError: the tile is missing or damaged.
            IndexError: the tile is not in the grid.
        """
        rows, cols = self.tiles
        if not (0 <= row < rows and 0 <= col < cols):
            raise IndexError(f"tile at row {row}, column {col} of {rows} x {cols}")
        return self._stream(self._first[0] + row, self._first[1] + col)

    def box(self, row0: int, row1: int, col0: int, col1: int) -> JpegGrid:
        """Return a half-open box that begins at a tile boundary; it may end anywhere.

        Raises:
            ValueError: the box begins within a tile, is empty, or not inside.
        """
        (rows, cols, channels), (high, wide) = self.shape, self.chunk
        if not (0 <= row0 < row1 <= rows and 0 <= col0 < col1 <= cols):
            raise ValueError(
                f"box rows {row0}:{row1}, columns {col0}:{col1} is not inside {rows} x {cols}"
            )
        if row0 % high or col0 % wide:
            raise ValueError(
                f"box begins at row {row0}, column {col0}, within a tile of {high} x {wide}; "
                "align it with the tiles"
            )
        first = self._first[0] + row0 // high, self._first[1] + col0 // wide
        shape = row1 - row0, col1 - col0, channels
        return JpegGrid(shape, self.chunk, self.downsample, self._stream, first)

    def at(self, x: int, y: int, size: tuple[int, int]) -> JpegGrid | None:
        """Return the box with the pixels of `Slide.read_scaled(x, y, size, scale)`.

        Args:
            x: level-0 column of the top-left corner, relative to that of this grid.
            y: level-0 row of the corner.
            size: rows and columns, in pixels of the level.

        Returns:
            None if the box begins between pixels or within a tile, or is not inside.
        """
        row, col = y / self.downsample, x / self.downsample
        inside = 0 <= row <= self.shape[0] - size[0] and 0 <= col <= self.shape[1] - size[1]
        if not inside or row % self.chunk[0] or col % self.chunk[1]:
            return None
        return self.box(int(row), int(row) + size[0], int(col), int(col) + size[1])
