"""One HDF5 file in progress, under a temporary name until it is complete and on disk.

Complete shards are synced and hashed while the next one is written. Datasets are written directly
by chunks: raw ones bypass HDF5's conversions, which is three times as fast, and any HDF5 can read
them; compressed ones, because plain HDF5 lacks these codecs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.common.files import settle, sync
from spatialdl.data.codec import Coding
from spatialdl.data.format import sha256_of, shard_name
from spatialdl.data.jpeg import JpegStream
from spatialdl.data.samples import ShardInfo

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


_PAGE = 4096
_ALIGNED_FROM = 2**17  # bytes; padding of smaller chunks would waste space
_MOST_WAITING = 2  # limits the pages that are not on disk yet


class ImageRows(Protocol):
    """An image that is read by rows, such as a memory map or a slide: `image[row0:row1]`.

    If it is not of uint8, it also has a `dtype`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols, channels) or (rows, cols)."""

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows as an array."""


class ShardFile:
    """A shard in progress.

    Args:
        folder: its folder.
        number: its index in the manifest, and in its name.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.samples = 0
        self.bytes = 0  # stored bytes of pixels
        self._final = folder / shard_name(number)
        self._temporary = self._final.with_suffix(".h5.tmp")
        # Windows are read a tenth faster from a memory map if chunks start at a page.
        self.h5 = h5py.File(
            self._temporary, "w", alignment_threshold=_ALIGNED_FROM, alignment_interval=_PAGE
        )

    def finish(self) -> ShardInfo:
        """Close, sync and rename the shard."""
        self.close()
        return self.settle()

    def close(self) -> None:
        """Write the remaining data; nothing can be added afterwards."""
        self.h5.close()

    def settle(self) -> ShardInfo:
        """Sync and rename a closed shard, in any thread; return its manifest entry."""
        with ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
            synced = thread.submit(sync, self._temporary)
            digest = sha256_of(self._temporary)  # concurrently, while the pages are in memory
            synced.result()
        settle(self._temporary, self._final)
        return ShardInfo(self._final.name, self._final.stat().st_size, digest, self.samples)

    def abort(self) -> None:
        """Close and discard the shard."""
        with suppress(OSError, RuntimeError):  # buffered data may not fit on a full disk
            self.h5.close()


class Settling:
    """A thread that syncs and renames shards, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="settling")
        self._shards: list[Future[ShardInfo]] = []

    def add(self, file: ShardFile) -> None:
        """Close a shard and queue it for the thread.

        Raises:
            OSError: this one, or an earlier one, cannot be written.
        """
        file.close()
        for shard in self._shards[: 1 - _MOST_WAITING]:
            shard.result()
        self._shards.append(self._thread.submit(file.settle))

    def finish(self) -> list[ShardInfo]:
        """Wait for all shards and return their manifest entries, by number.

        Raises:
            OSError: a shard cannot be written.
        """
        infos = [shard.result() for shard in self._shards]
        self._thread.shutdown()
        return sorted(infos, key=lambda info: info.file)

    def abort(self) -> None:
        """Cancel queued shards; return when no write is in progress."""
        self._thread.shutdown(cancel_futures=True)
        self._shards.clear()


class ShardSeries:
    """Shards written one after the other, or several stripes of them side by side.

    Args:
        folder: folder of the shards.
        shard_size: maximum bytes of decoded pixels per shard.
        coding: coding of the images.
    """

    def __init__(self, folder: Path, shard_size: int, coding: Coding | None = None) -> None:
        self._folder, self._shard_size = folder, shard_size
        self._coding = coding or Coding()
        self._settling = Settling()
        self._started = 0
        self._open: dict[int, ShardFile] = {}  # by stripe
        self.dtype = np.dtype(np.uint8)
        self.masks = False

    def finish(self) -> list[ShardInfo]:
        """Finish the last shards and return all of them."""
        for stripe in list(self._open):
            self._end(stripe)
        return self._settling.finish()

    def abort(self) -> None:
        """Close the open shards and keep the finished ones."""
        for file in self._open.values():
            file.abort()
        self._settling.abort()

    def _start(self, stripe: int = 0) -> ShardFile:
        file = self._open[stripe] = ShardFile(self._folder, self._started)
        self._started += 1
        return file

    def _end(self, stripe: int = 0) -> None:
        self._settling.add(self._open[stripe])
        del self._open[stripe]
