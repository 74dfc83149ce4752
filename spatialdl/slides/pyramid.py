"""Writer of pyramidal, tiled TIFFs from bands of rows, in constant memory.

Colours are stored as JPEG, grey values lossless. Grey values of 0 may mean "no value": these are
excluded from the means of reduced levels.
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

from spatialdl.common.files import unfinished

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
    """Write a pyramid: level 0 from `bands`, each further level half the size of the previous.

    Args:
        path: the TIFF; written under a temporary name, then renamed.
        bands: from top to bottom, uint8 (rows, columns, 3), or (rows, columns) of grey values; rows
            a multiple of `TILE`, except in the last.
        size: rows and columns of level 0.
        mpp: micrometres per pixel, the resolution of the file; None if unknown.
        grey: bands have grey values.
        empty: grey values of 0 mean "no value".
        description: openslide's property ``tiff.ImageDescription``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = level_sizes(size)
    with (
        unfinished(path) as temporary,
        tempfile.TemporaryFile() as spool,
        tifffile.TiffWriter(temporary) as tiff,
    ):
        levels = [_Level(spool, empty) for _ in sizes[1:]]
        level0 = _level0(bands, levels, size[0])
        for number, tiles in enumerate([level0, *(level.tiles() for level in levels)]):
            _write_level(tiff, tiles, sizes[number], number, grey, mpp, description)


def level_sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the sizes of all levels: halved until the longer side is at most 512."""
    sizes = [size]
    while max(sizes[-1]) > _SMALLEST and min(sizes[-1]) > 1:
        sizes.append((sizes[-1][0] // 2, sizes[-1][1] // 2))
    return sizes


class _Level:
    """A reduced level in progress: rows not tiled yet, and encoded tiles in a temporary file."""

    def __init__(self, spool: IO[bytes], empty: bool) -> None:
        self._spool, self._empty = spool, empty
        self._places: list[tuple[int, int]] = []
        self._rows: list[Bytes] = []

    def add(self, rows: Bytes, *, last: bool) -> Bytes | None:
        """Add rows of the finer level; return the rows tiled by this call, for the next level."""
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
        rows: Bytes | None = band
        # before the tiles: the generator is not resumed after the last one
        for level in levels:
            rows = None if rows is None else level.add(rows, last=row == height)
        yield from _encoded(band)


def _halved(rows: Bytes) -> Bytes:
    """Means of 2 x 2 pixels; a last odd row or column is dropped."""
    even = rows[: len(rows) // 2 * 2, : rows.shape[1] // 2 * 2]
    if even.size == 0:
        return even[:0, : rows.shape[1] // 2]
    return np.asarray(Image.fromarray(even).reduce(2))


def _halved_values(rows: Bytes) -> Bytes:
    """Means of 2 x 2 grey values, 0 excluded; 0 where all four are 0."""
    height, width = rows.shape[0] // 2, rows.shape[1] // 2
    blocks = rows[: 2 * height, : 2 * width].reshape(height, 2, width, 2)
    sums, counts = blocks.sum((1, 3), np.uint16), np.count_nonzero(blocks, (1, 3))
    return np.asarray((sums + counts // 2) // np.maximum(counts, 1), np.uint8)


def _encoded(rows: Bytes) -> Iterator[bytes]:
    """Encoded tiles in row-major order; tiles at the edges are padded by repeating the edge."""
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
