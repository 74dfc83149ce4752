"""JPEG coding of image chunks, for shards and for the tiles of slides.

libjpeg conceals damage in a stream and only warns; simplejpeg raises an error then. An
`EncodedImage` is stored unchanged, stream by stream.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import numpy.typing as npt
import simplejpeg

Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
QUALITY = 90
_CHANNELS = {"Gray": 1, "RGB": 3, "YCbCr": 3}


class JpegStream(bytes):
    """A JPEG stream validated by `checked`; `shape` is its (rows, cols, channels)."""

    shape: Shape

    def __new__(cls, stream: bytes, shape: Shape) -> Self:
        """Attach the shape to the bytes."""
        made = super().__new__(cls, stream)
        made.shape = shape
        return made

    def __reduce__(self) -> tuple[type[JpegStream], tuple[bytes, Shape]]:
        """Pickle the bytes with their shape."""
        return JpegStream, (bytes(self), self.shape)


def check_channels(channels: int) -> None:
    """Reject images that JPEG does not support.

    Raises:
        ValueError: `channels` is neither 1 nor 3.
    """
    if channels not in (1, 3):
        raise ValueError(
            f"image has {channels} channels, but codec 'jpeg' supports 1 or 3; use another codec"
        )


def check_codec(codec: str) -> None:
    """Reject encoded images for other codecs.

    Raises:
        ValueError: `codec` is not "jpeg".
    """
    if codec != "jpeg":
        raise ValueError(f"image is encoded but codec is {codec!r}; use codec='jpeg'")


def encode(chunk: Pixels, quality: int = QUALITY) -> JpegStream:
    """Encode a chunk, (rows, cols, 1 or 3) uint8, without chroma subsampling.

    Raises:
        ValueError: it has another number of channels.
    """
    rows, cols, channels = chunk.shape
    check_channels(channels)
    colours, sampled = ("GRAY", "Gray") if channels == 1 else ("RGB", "444")
    stream = simplejpeg.encode_jpeg(np.ascontiguousarray(chunk), quality, colours, sampled)
    return JpegStream(stream, (rows, cols, channels))


def decode(stream: bytes, shape: Shape) -> Pixels:
    """Decode a JPEG of a known shape, (rows, cols, channels).

    Raises:
        ValueError: it is damaged, not a JPEG, or has another shape.
    """
    _check_shape(_shape(stream), shape)  # the decoder would convert to any channels
    return decode_colours(stream, shape[2])


def decode_colours(stream: bytes, channels: int) -> Pixels:
    """Decode a JPEG of any size to grey or RGB, regardless of its own colours.

    Returns:
        uint8 (rows, cols, channels), `channels` being 1 or 3.

    Raises:
        ValueError: it is damaged, or not a JPEG.
    """
    return np.asarray(simplejpeg.decode_jpeg(stream, "GRAY" if channels == 1 else "RGB"))


def decode_into(stream: mmap.mmap, out: Pixels) -> None:
    """Decode a large JPEG into an array, (rows, cols) of grey or (rows, cols, 3).

    Raises:
        ValueError: it is damaged.
    """
    simplejpeg.decode_jpeg(stream, "GRAY" if out.ndim == 2 else "RGB", buffer=out)


def checked(stream: bytes, shape: Shape) -> JpegStream:
    """Check that a stream is intact and of a shape, at half the cost of full decoding or less.

    The whole stream is decoded, because only that detects damage, but to grey at an eighth of the
    size. A stream that was checked before is not checked again.

    Raises:
        ValueError: it is damaged, not a JPEG, or has another shape.
    """
    if isinstance(stream, JpegStream):
        _check_shape(stream.shape, shape)
        return stream
    _check_shape(_shape(stream), shape)
    simplejpeg.decode_jpeg(stream, "GRAY", min_height=1, min_width=1)
    return JpegStream(stream, shape)


def _shape(stream: bytes) -> Shape:
    """(Rows, cols, channels) in the header."""
    try:
        rows, cols, colours, _ = simplejpeg.decode_jpeg_header(stream)
    except ValueError as error:
        raise ValueError(f"not a JPEG, or damaged: {error}") from error
    if colours not in _CHANNELS:
        raise ValueError(f"the JPEG has colours {colours}, expected grey, RGB or YCbCr")
    return rows, cols, _CHANNELS[colours]


def _check_shape(found: tuple[int, ...], shape: Shape) -> None:
    if found != tuple(shape):
        raise ValueError(f"the JPEG is {_shape_text(found)}, expected {_shape_text(shape)}")


def _shape_text(shape: tuple[int, ...]) -> str:
    rows, cols, channels = shape
    return f"{rows} x {cols} with {channels} channel{'s' * (channels != 1)}"


class EncodedImage(ABC):
    """An image as a grid of JPEG streams, e.g. the tiles of a slide.

    Every stream is a chunk of full size, also at the right and lower edge; its pixels beyond the
    image are ignored.

    Attributes:
        shape: (rows, cols, channels); 1 or 3 channels, the same as in the streams.
        chunk: (rows, columns) of pixels of a stream.
    """

    shape: tuple[int, int, int]
    chunk: tuple[int, int]

    @abstractmethod
    def encoded(self, row: int, col: int) -> bytes:
        """The stream at a row and column of the grid: a JPEG with all its tables."""


def grid_of(image: EncodedImage) -> tuple[int, int]:
    """(Rows, columns) of the stream grid.

    Raises:
        ValueError: an empty shape or chunk.
    """
    shape, chunk = tuple(image.shape), tuple(image.chunk)
    if len(shape) != 3 or len(chunk) != 2 or min(*shape, *chunk) < 1:
        raise ValueError(
            f"encoded image has shape {shape} and chunks {chunk}, expected (rows, cols, channels) "
            "and (rows, cols)"
        )
    return -(-shape[0] // chunk[0]), -(-shape[1] // chunk[1])


def checked_stream(image: EncodedImage, row: int, col: int) -> JpegStream:
    """The stream at a row and column of the grid, checked to be intact and of the chunk shape.

    Raises:
        ValueError: it is not, or the image raised it.
    """
    stream = image.encoded(row, col)
    try:
        return checked(stream, (*image.chunk, image.shape[2]))
    except ValueError as error:
        raise ValueError(f"stream at row {row}, column {col} of the image: {error}") from error
