"""Writing a pyramidal, tiled TIFF from bands of rows, in memory that does not grow.

Colours are kept as JPEG, grey values without loss. Grey values of 0 may stand for places without a
value: of these the reduced levels have no part.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image

from spatialdl.data.saving import unfinished

Bytes = npt.NDArray[np.uint8]

TILE = 256
_QUALITY = 85
_EFFORT = 6
_SMALLEST = 512


def write_pyramid(
    path: Path,
    bands: Iterable[Bytes],
    size: tuple[int, int],
    mpp: float | None,
    *,
    grey: bool = False,
    empty: bool = False,
    description: str | None = None,
) -> None:
    """Write `path`: level 0 from `bands`, every further level half of the one before.

    Args:
        path: the TIFF; written under a temporary name, then renamed.
        bands: from top to bottom, uint8 (rows, columns, 3), or (rows, columns) of grey values; rows
            a multiple of `TILE`, except in the last.
        size: rows and columns of level 0.
        mpp: micrometres per pixel, kept as the resolution of the file; None where nobody knows.
        grey: whether there are grey values.
        empty: whether those of 0 are places without a value.
        description: kept in the file, which openslide calls ``tiff.ImageDescription``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = level_sizes(size)
    with (
        unfinished(path) as temporary,
        tempfile.TemporaryFile() as spool,
        tifffile.TiffWriter(temporary) as tiff,
    ):
        levels = [_Level(spool, empty) for _ in sizes[1:]]
        given = _level0(bands, levels, size[0])
        for number, tiles in enumerate([given, *(level.tiles() for level in levels)]):
            _write_level(tiff, tiles, sizes[number], number, grey, mpp, description)


def level_sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes of all levels: halved until the longer side is at most 512."""
    sizes = [size]
    while max(sizes[-1]) > _SMALLEST and min(sizes[-1]) > 1:
        sizes.append((sizes[-1][0] // 2, sizes[-1][1] // 2))
    return sizes


class _Level:
    """A reduced level in progress: rows still to be tiled, and tiles waiting for their turn."""

    def __init__(self, spool: IO[bytes], empty: bool) -> None:
        self._spool, self._empty = spool, empty
        self._places: list[tuple[int, int]] = []
        self._rows: list[Bytes] = []

    def add(self, rows: Bytes, *, last: bool) -> Bytes | None:
        """Take rows of the finer level; returns those that are now tiled, for the next level."""
        rows = _halved_values(rows) if self._empty else _halved(rows)
        self._rows.append(rows)
        held = sum(len(part) for part in self._rows)
        if not last and held % (2 * TILE):
            return None
        whole = np.concatenate(self._rows)
        self._rows = []
        for tile in _encoded(whole):
            self._spool.seek(0, 2)
            self._places.append((self._spool.tell(), len(tile)))
            self._spool.write(tile)
        return whole

    def tiles(self) -> Iterator[bytes]:
        for place, length in self._places:
            self._spool.seek(place)
            yield self._spool.read(length)


def _level0(bands: Iterable[Bytes], levels: list[_Level], height: int) -> Iterator[bytes]:
    row = 0
    for band in bands:
        row += len(band)
        # before the tiles go out: nobody asks for more after the last one
        _reduce_into(levels, band, last=row == height)
        yield from _encoded(band)


def _reduce_into(levels: list[_Level], band: Bytes, *, last: bool) -> None:
    rows: Bytes | None = band
    for level in levels:
        if rows is None:
            return
        rows = level.add(rows, last=last)


def _halved(rows: Bytes) -> Bytes:
    """Means of 2 x 2 pixels; an odd row or column at the end is dropped."""
    even = rows[: len(rows) // 2 * 2, : rows.shape[1] // 2 * 2]
    if even.size == 0:
        return even[:0, : rows.shape[1] // 2]
    return np.asarray(Image.fromarray(even).reduce(2))


def _halved_values(rows: Bytes) -> Bytes:
    """Means of those of 2 x 2 grey values that are not 0; 0 where all of them are."""
    height, width = rows.shape[0] // 2, rows.shape[1] // 2
    blocks = rows[: 2 * height, : 2 * width].reshape(height, 2, width, 2)
    sums, counts = blocks.sum((1, 3), np.uint16), np.count_nonzero(blocks, (1, 3))
    return np.asarray((sums + counts // 2) // np.maximum(counts, 1), np.uint8)


def _encoded(rows: Bytes) -> Iterator[bytes]:
    """Tiles in reading order; those at the edges are filled by repeating it."""
    height, width = rows.shape[:2]
    fill = ((0, -height % TILE), (0, -width % TILE), (0, 0))[: rows.ndim]
    padded = np.pad(rows, fill, mode="edge") if any(map(any, fill)) else rows
    for row in range(0, height, TILE):
        for col in range(0, width, TILE):
            tile = np.ascontiguousarray(padded[row : row + TILE, col : col + TILE])
            if tile.ndim == 2:
                yield zlib.compress(tile.tobytes(), _EFFORT)
                continue
            yield bytes(
                imagecodecs.jpeg8_encode(
                    tile,
                    level=_QUALITY,
                    colorspace="RGB",
                    outcolorspace="YCBCR",
                    subsampling="420",
                )
            )


def _write_level(
    tiff: tifffile.TiffWriter,
    tiles: Iterator[bytes],
    size: tuple[int, int],
    number: int,
    grey: bool,
    mpp: float | None,
    description: str | None,
) -> None:
    more: dict[str, Any] = {"photometric": "minisblack", "compression": "adobe_deflate"}
    if not grey:
        more = {"photometric": "ycbcr", "compression": "jpeg", "subsampling": (2, 2)}
    if mpp is not None:
        per_cm = 1e4 / (mpp * 2**number)
        more |= {"resolution": (per_cm, per_cm), "resolutionunit": "CENTIMETER"}
    if number == 0 and description is not None:
        more["description"] = description
    tiff.write(
        tiles,
        shape=size if grey else (*size, 3),
        dtype=np.uint8,
        tile=(TILE, TILE),
        subfiletype=1 if number else 0,
        metadata=None,
        software="spatialdl",
        **more,
    )
