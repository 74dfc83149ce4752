"""Datasets of images in HDF5, chunk by chunk as they lie in the file.

Raw chunks are written past HDF5's own conversions, which is three times as fast; any HDF5 reads
them. JPEG chunks are written and read so because HDF5 itself knows no JPEG: the dataset names the
registered filter for it (32019, https://github.com/CARS-UChicago/jpegHDF5), and a reader without
that plug-in gets an error, never streams for pixels.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import QUALITY, Codec, JpegStream, check_channels, decode, encode

Pixels = npt.NDArray[np.uint8]

JPEG_FILTER = 32019
_GREY, _COLOUR = 0, 1  # the filter's names for 1 and 3 channels


class Chunks:
    """A dataset of an image, a mask, or a stack of them, that is written by whole chunks.

    Args:
        h5: where it is made.
        name: of the dataset.
        shape: (rows, cols, channels) or (rows, cols) of an image.
        chunk: rows and columns of a chunk; may be larger than the image.
        stacked: a stack of such images, none at first.
        codec: "jpeg" for images of 1 or 3 channels.
        quality: of the JPEGs made here.

    Raises:
        ValueError: JPEG does not hold so many channels.
    """

    def __init__(
        self,
        h5: h5py.File,
        name: str,
        shape: tuple[int, ...],
        chunk: tuple[int, int],
        *,
        stacked: bool = False,
        codec: Codec = "raw",
        quality: int = QUALITY,
    ) -> None:
        self._cell = (*chunk, *shape[2:])
        self._shape = shape
        self._stacked = stacked
        self._length = 0
        self._quality = quality if codec == "jpeg" else None
        more: dict[str, Any] = {}
        if codec == "jpeg":
            check_channels(shape[2])
            colours = _GREY if shape[2] == 1 else _COLOUR
            more = {
                "compression": JPEG_FILTER,
                "compression_opts": (quality, chunk[1], chunk[0], colours),
                "allow_unknown_filter": True,
            }
        room = tuple(map(max, shape, self._cell))  # HDF5 wants chunks no larger than the most
        # kept: asking HDF5 for it by name takes longer than writing a small tile
        self.dataset = h5.create_dataset(
            name,
            (0, *shape) if stacked else shape,
            np.uint8,
            chunks=(1, *self._cell) if stacked else self._cell,
            maxshape=(None, *room) if stacked else room if room != shape else None,
            **more,
        )

    def grow(self) -> int:
        """Make room for one more image of a stack; returns its number."""
        # one by one: room made ahead would have to be given back, which HDF5 does chunk by chunk
        number, self._length = self._length, self._length + 1
        self.dataset.id.set_extent((self._length, *self._shape))
        return number

    def write(self, pixels: Pixels, row0: int = 0, number: int = 0) -> None:
        """Write rows of an image, whole chunks or to its end.

        Args:
            pixels: (some rows, cols, channels) or (some rows, cols).
            row0: the first of them, the first of a chunk.
            number: of the image in a stack.
        """
        rows, cols = self._cell[:2]
        for row in range(0, pixels.shape[0], rows):
            for col in range(0, pixels.shape[1], cols):
                part = pixels[row : row + rows, col : col + cols]
                self._put(self._stored(part), row0 + row, col, number)

    def write_stream(self, stream: JpegStream, row: int, col: int, number: int = 0) -> None:
        """Write the JPEG of the chunk that begins at a row and column of an image."""
        self._put(stream, row, col, number)

    def _put(self, stored: bytes | Pixels, row: int, col: int, number: int) -> None:
        place = (row, col, 0)[: len(self._shape)]
        self.dataset.id.write_direct_chunk((number, *place) if self._stacked else place, stored)

    def _stored(self, part: Pixels) -> bytes | Pixels:
        """A chunk with this part in its first corner."""
        if self._quality is None:
            if part.shape == self._cell:
                return np.ascontiguousarray(part)
            chunk = np.zeros(self._cell, np.uint8)
            chunk[: part.shape[0], : part.shape[1]] = part
            return chunk
        more = [(0, whole - has) for whole, has in zip(self._cell, part.shape, strict=True)]
        # the last pixels go on, which costs fewer bytes than an edge
        return encode(np.pad(part, more, mode="edge"), self._quality)


def read_jpeg(dataset: h5py.Dataset, out: Pixels, where: tuple[int | slice, ...]) -> None:
    """Read a box of a dataset of JPEG chunks; only those that it touches are decoded.

    Args:
        dataset: of one image, or of a stack.
        out: where its pixels go, (rows, cols, channels).
        where: the number of the image in a stack, then rows and columns as slices.

    Raises:
        ValueError: it is no such dataset, or a chunk is missing or damaged, which is named.
    """
    *before, rows, cols = where
    assert isinstance(rows, slice)
    assert isinstance(cols, slice)
    _check_dataset(dataset, out, (*before, rows, cols))
    high, wide, channels = dataset.chunks[-3:]
    for row in range(rows.start // high * high, rows.stop, high):
        for col in range(cols.start // wide * wide, cols.stop, wide):
            pixels = _decoded(dataset, (*before, row, col, 0), (high, wide, channels))
            y0, y1 = max(row, rows.start), min(row + high, rows.stop)
            x0, x1 = max(col, cols.start), min(col + wide, cols.stop)
            part = pixels[y0 - row : y1 - row, x0 - col : x1 - col]
            out[y0 - rows.start : y1 - rows.start, x0 - cols.start : x1 - cols.start] = part


def _decoded(dataset: h5py.Dataset, place: tuple[Any, ...], shape: tuple[int, int, int]) -> Pixels:
    try:
        if dataset.id.get_chunk_info_by_coord(place).byte_offset is None:
            raise ValueError("it was not written")
        unfiltered, stream = dataset.id.read_direct_chunk(place)
        if unfiltered:
            raise ValueError("it is not stored as JPEG")
        return decode(bytes(stream), shape)
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"chunk at {place}: {error}") from error


def _check_dataset(dataset: h5py.Dataset, out: Pixels, where: tuple[Any, ...]) -> None:
    """Chunks are addressed past HDF5's own checks, so these are made here."""
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(k)[0] for k in range(settings.get_nfilters())]
    if filters != [JPEG_FILTER] or dataset.dtype != np.uint8:
        raise ValueError(f"it has {dataset.dtype} and filters {filters}, expected bytes in JPEG")
    ends = tuple(at.stop if isinstance(at, slice) else at + 1 for at in where)
    size = dataset.shape[:-1]
    if len(size) != len(ends) or any(end > n for end, n in zip(ends, size, strict=True)):
        raise ValueError(f"its shape is {dataset.shape}, where {ends} is wanted")
    if dataset.shape[-1] != out.shape[-1] or dataset.chunks[-1] != out.shape[-1]:
        raise ValueError(f"it has {dataset.shape[-1]} channels, expected {out.shape[-1]}")
