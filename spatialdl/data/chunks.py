"""Image datasets in HDF5, written directly by chunks.

Raw chunks bypass HDF5's conversions, which is three times as fast; any HDF5 can read them.
Compressed chunks are written directly because plain HDF5 lacks these codecs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from imagecodecs import deflate_crc32  # libdeflate's: ten times as fast as zlib's

from spatialdl.data.codec import Coding
from spatialdl.data.jpeg import JpegStream

Pixels = npt.NDArray[Any]


class Chunks:
    """A dataset of an image, a mask, or a stack of them, written by whole chunks.

    Args:
        h5: the file.
        name: name of the dataset.
        shape: (rows, cols, channels) or (rows, cols) of an image, of a volume with leading slices.
        chunk: ([slices,] rows, columns) of a chunk, which may be larger than the image.
        dtype: type of the pixels.
        stacked: whether it is a stack of such images, initially empty.
        coding: coding of the chunks.

    Attributes:
        sums: CRC-32 of the chunks of each image, in the order in which they were written.

    Raises:
        ValueError: the codec does not support such images.
    """

    def __init__(
        self,
        h5: h5py.File,
        name: str,
        shape: tuple[int, ...],
        chunk: tuple[int, ...],
        dtype: npt.DTypeLike = np.uint8,
        *,
        stacked: bool = False,
        coding: Coding | None = None,
    ) -> None:
        self._spatial = len(chunk)
        self._cell = (*chunk, *shape[len(chunk) :])
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._stacked = stacked
        self._length = 0
        self.sums: list[int] = [] if stacked else [0]
        self._coding = coding or Coding()
        channels = shape[-1] if len(shape) > len(chunk) else 1
        self._coding.check(channels, self._dtype, self._spatial)
        room = tuple(map(max, shape, self._cell))  # HDF5 requires chunks no larger than maxshape
        # Cached: a lookup by name in HDF5 takes longer than writing a small tile.
        self.dataset = h5.create_dataset(
            name,
            (0, *shape) if stacked else shape,
            self._dtype,
            chunks=(1, *self._cell) if stacked else self._cell,
            maxshape=(None, *room) if stacked else room if room != shape else None,
            **self._coding.filters(self._cell, self._dtype),
        )

    def grow(self) -> int:
        """Extend a stack by one image and return its index."""
        # One at a time: HDF5 would free unused extent chunk by chunk.
        number, self._length = self._length, self._length + 1
        self.sums.append(0)
        self.dataset.id.set_extent((self._length, *self._shape))
        return number

    def write(self, pixels: Pixels, row0: int = 0, number: int = 0) -> None:
        """Write rows of an image (slices of a volume), in whole chunks or to its end.

        Args:
            pixels: ([slices,] rows, cols[, channels]), of the dataset's type.
            row0: the first row, at the start of a chunk.
            number: index of the image in a stack.
        """
        chunk = self._cell[: self._spatial]
        sizes = pixels.shape[: self._spatial]
        for place in product(*(range(0, n, each) for n, each in zip(sizes, chunk, strict=True))):
            part = pixels[tuple(slice(at, at + n) for at, n in zip(place, chunk, strict=True))]
            at = (row0 + place[0], *place[1:])
            self._put(self._coding.encode(self._whole(part)), at, number)

    def write_stream(self, stream: JpegStream, row: int, col: int, number: int = 0) -> None:
        """Write the JPEG of the chunk that starts at a row and column of an image."""
        self._put(stream, (row, col), number)

    def _put(self, stored: Any, place: tuple[int, ...], number: int) -> None:
        self.sums[number] = deflate_crc32(stored, value=self.sums[number])
        place = (*place, 0)[: len(self._shape)]
        self.dataset.id.write_direct_chunk((number, *place) if self._stacked else place, stored)

    def _whole(self, part: Pixels) -> Pixels:
        """A full chunk with this part in its first corner."""
        if part.shape == self._cell:
            return part
        if self._coding.codec == "jpeg":
            more = [(0, whole - has) for whole, has in zip(self._cell, part.shape, strict=True)]
            # Repeated edge pixels compress better than a sharp edge.
            return np.pad(part, more, mode="edge")
        chunk = np.zeros(self._cell, self._dtype)
        chunk[tuple(map(slice, part.shape))] = part
        return chunk
