"""TIFFs of tiles that are compressed here, so that their streams are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile

Bytes = npt.NDArray[np.uint8]


def picture(rows: int, cols: int) -> Bytes:
    """Smooth colours with some noise."""
    y, x = np.mgrid[:rows, :cols]
    noise = np.random.default_rng(rows).integers(0, 40, (rows, cols))
    return np.stack([x * 200 // cols + noise, y * 200 // rows + noise, (x + y) % 256], -1).astype(
        np.uint8
    )


def jpeg(tile: Bytes, colour: str = "YCBCR", subsampling: str = "420") -> bytes:
    return bytes(
        imagecodecs.jpeg8_encode(
            tile,
            level=80,
            colorspace="GRAYSCALE" if tile.ndim == 2 else "RGB",
            outcolorspace=colour,
            subsampling=subsampling if colour == "YCBCR" else "444",
        )
    )


def tiles_of(image: Bytes, side: int) -> list[Bytes]:
    rows, cols = (-(-n // side) * side for n in image.shape[:2])
    more = ((0, rows - image.shape[0]), (0, cols - image.shape[1]), (0, 0))
    padded = np.pad(image, more[: image.ndim], mode="edge")
    return [
        np.ascontiguousarray(padded[row : row + side, col : col + side])
        for row in range(0, rows, side)
        for col in range(0, cols, side)
    ]


def write_tiff(
    path: Path,
    levels: list[Bytes],
    encode: Callable[[Bytes], bytes] = jpeg,
    photometric: str = "ycbcr",
    compression: int = 7,
    description: str | None = None,
    side: int = 256,
    **more: object,
) -> Path:
    """A pyramid of tiles as `encode` gives them."""
    with tifffile.TiffWriter(path, bigtiff=bool(more.pop("bigtiff", False))) as tiff:
        for number, image in enumerate(levels):
            tiff.write(
                iter([encode(tile) for tile in tiles_of(image, side)]),
                shape=image.shape,
                dtype=np.uint8,
                tile=(side, side),
                photometric=photometric,
                compression=compression,
                subfiletype=1 if number else 0,
                description=description,
                metadata=None,
                **more,
            )
    return path


def spoil(path: Path, number: int, how: str) -> None:
    """Make a tile missing, zero from the middle on, or end there though its own end is left."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        tag, start = page.tags["TileByteCounts"], page.dataoffsets[number]
        middle, end = (start + page.databytecounts[number] // n for n in (2, 1))
    size = {3: 2, 4: 4, 16: 8}[tag.dtype]
    content = bytearray(path.read_bytes())
    if how == "missing":
        place = tag.valueoffset + number * size
        content[place : place + size] = bytes(size)
    elif how == "zero":
        content[middle:end] = bytes(end - middle)
    else:
        content[middle : middle + 2] = b"\xff\xd9"
    path.write_bytes(content)


_SCN = """<?xml version="1.0"?>
<scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" uuid="urn:uuid:0">
<collection name="c" uuid="urn:uuid:1" sizeX="{0}" sizeY="{1}">{2}</collection></scn>"""
_OF_SCN = """<image name="{0}" uuid="urn:uuid:{0}">
<creationDate>2020-01-01T00:00:00Z</creationDate><device model="Leica SCN400" version="1"/>
<pixels sizeX="{1}" sizeY="{2}"><dimension sizeX="{1}" sizeY="{2}" r="0" ifd="{0}"/></pixels>
<view sizeX="{3}" sizeY="{4}" offsetX="{5}" offsetY="{6}" spacingZ="0"/><scanSettings>
<objectiveSettings><objective>20</objective></objectiveSettings><illuminationSettings>
<numericalAperture>0.8</numericalAperture><illuminationSource>brightfield</illuminationSource>
</illuminationSettings></scanSettings></image>"""


def write_scn(path: Path, scanned: Bytes, size: tuple[int, int], start: tuple[int, int]) -> Path:
    """A slide of `size` (rows, columns) as Leica's, scanned from x and y on; it has bounds."""
    (rows, cols), nm = size, 500
    macro = np.full((rows // 8, cols // 8, 3), 200, np.uint8)
    images = (
        (0, *macro.shape[1::-1], cols * nm, rows * nm, 0, 0),
        (1, *scanned.shape[1::-1], *(nm * n for n in (*scanned.shape[1::-1], *start))),
    )
    described = "".join(_OF_SCN.format(*one) for one in images)
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for number, image in enumerate((macro, scanned)):
            told = None if number else _SCN.format(cols * nm, rows * nm, described)
            tiff.write(image, photometric="rgb", tile=(64, 64), metadata=None, description=told)
    return path
