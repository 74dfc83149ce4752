"""Decoding of a TIFF slide's own tiles, several times as fast as openslide.

Supports JPEG of 8-bit grey or colour, and Aperio's JPEG 2000 of RGB, for levels that match exactly
one page of the file. Openslide reads all other levels, and every tile that is missing or does not
decode, and raises the errors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tifffile

from spatialdl.data.jpeg import JpegStream, checked
from spatialdl.slides.reading.decoding import Decoder, decoder_of

Bytes = npt.NDArray[np.uint8]
Background = tuple[int, int, int]

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
            uint8 (rows, cols, 3); None if a tile in it is missing or damaged, or the level is
            not supported.
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
        if top >= bottom or left >= right:
            return box
        for i in range(top // th, (bottom - 1) // th + 1):
            for j in range(left // tw, (right - 1) // tw + 1):
                tile = self._tile(level, i * place.across + j)
                if tile is None:
                    return None
                y0, y1 = max(i * th, top), min((i + 1) * th, bottom)
                x0, x1 = max(j * tw, left), min((j + 1) * tw, right)
                box[y0 - row : y1 - row, x0 - col : x1 - col] = tile[
                    y0 - i * th : y1 - i * th, x0 - j * tw : x1 - j * tw
                ]
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
        except (ValueError, RuntimeError):  # errors of imagecodecs are RuntimeErrors
            return None
        return tile if tile.shape == (*place.tile, 3) else None

    def _stored(self, level: int, number: int) -> bytes:
        place = self.levels[level]
        if place.offsets[number] + place.lengths[number] > os.fstat(self._file.fileno()).st_size:
            raise ValueError("the tile extends beyond the end of the file")
        # pread, since forked processes share the position in the file
        return os.pread(self._file.fileno(), int(place.lengths[number]), int(place.offsets[number]))


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
