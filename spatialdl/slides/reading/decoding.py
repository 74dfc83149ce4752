"""Decoding of the compressed tiles of a TIFF to RGB, as openslide does.

libjpeg conceals damage in a JPEG stream and only warns; openslide and simplejpeg turn the warning
into an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import imagecodecs
import numpy as np
import numpy.typing as npt

from spatialdl.data import jpeg

Bytes = npt.NDArray[np.uint8]

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
