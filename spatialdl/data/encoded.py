"""Images that are already JPEG streams, one per chunk, and are stored unchanged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from spatialdl.data.jpeg import JpegStream, checked


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


@dataclass
class Streams(EncodedImage):
    """Streams in memory, row by row."""

    shape: tuple[int, int, int]
    chunk: tuple[int, int]
    streams: Sequence[bytes]

    def encoded(self, row: int, col: int) -> bytes:
        """The stream at a row and column of the grid."""
        return self.streams[row * grid_of(self)[1] + col]


def grid_of(image: EncodedImage) -> tuple[int, int]:
    """(Rows, columns) of the stream grid.

    Raises:
        ValueError: an empty shape or chunk, or another number of streams.
    """
    shape, chunk = tuple(image.shape), tuple(image.chunk)
    if len(shape) != 3 or len(chunk) != 2 or min(*shape, *chunk) < 1:
        raise ValueError(
            f"encoded image has shape {shape} and chunks {chunk}, expected (rows, cols, channels) "
            "and (rows, cols)"
        )
    grid = -(-shape[0] // chunk[0]), -(-shape[1] // chunk[1])
    if isinstance(image, Streams) and len(image.streams) != grid[0] * grid[1]:
        raise ValueError(
            f"encoded image of {shape[0]} x {shape[1]} in chunks of {chunk[0]} x {chunk[1]} has "
            f"{len(image.streams)} streams, expected {grid[0]} x {grid[1]}"
        )
    return grid


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
