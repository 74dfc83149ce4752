"""Reads of boxes of raw or compressed chunks, by `pread`.

Unlike a memory map, which is no faster, `pread` requests whole chunks on network file systems, and
raises an error for a truncated file instead of killing the process (SIGBUS). Of compressed data,
only the chunks under a box are decoded, with a cache.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from spatialdl.data.chunk_map import MISSING, ChunkMap, ChunkPart, Where
from spatialdl.data.codec import Codec, decode

Pixels = npt.NDArray[Any]
_MOST = 64 * 2**20  # bytes


class Sized(Protocol):
    """A value that knows its size."""

    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class ByteCache(Generic[Value]):
    """LRU cache with a limit in bytes, for several threads; the last value always stays.

    Args:
        most: maximum total bytes.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, value: Value) -> None:
        """Cache a value and drop those that were not used for longest."""
        with self._lock:
            before = self._kept.pop(key, None)
            self._bytes += value.nbytes - (0 if before is None else before.nbytes)
            self._kept[key] = value
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Remove all values; also valid in a forked process, where the lock may be taken."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._bytes = 0


CHUNKS = ByteCache[Pixels]()
"""The decoded chunks of this process."""
os.register_at_fork(after_in_child=CHUNKS.clear)


def read_raw(fd: int, chunks: ChunkMap, out: Pixels, where: Where) -> None:
    """Copy a non-empty box of raw chunks to `out`.

    Args:
        fd: descriptor of the file with the chunks.
        chunks: offsets of the chunks.
        out: of the box's shape.
        where: the box.

    Raises:
        ValueError: there is no such box, or a chunk was never written.
        OSError: the file cannot be read, or ends early.
    """
    cell = chunks.cell
    line = prod(cell[1:]) * chunks.dtype.itemsize  # bytes of a chunk's row (or slice)
    buffer: Pixels | None = None
    for part in _written(chunks, out, where):
        _, begin, (rows, *others), outside = part
        target = out[outside]
        offset = begin + rows.start * line
        whole = all(cut.stop - cut.start == n for cut, n in zip(others, cell[1:], strict=False))
        if target.flags.c_contiguous and whole:
            _fill(fd, target, offset)
            continue
        if buffer is None:
            buffer = np.empty(cell, chunks.dtype)
        whole_rows = buffer[: rows.stop - rows.start]
        _fill(fd, whole_rows, offset)
        target[...] = whole_rows[(slice(None), *others)]


def read_coded(
    fd: int,
    chunks: ChunkMap,
    codec: Codec,
    out: Pixels,
    where: Where,
    key: Hashable = None,
    cache: ByteCache[Pixels] = CHUNKS,
) -> None:
    """Decode a non-empty box of compressed chunks into `out`; as `read_raw`.

    Args:
        codec: codec of the chunks.
        key: cache key of the dataset in the current state of its file; None bypasses the cache.
        cache: cache of decoded chunks.

    Raises:
        ValueError: there is no such box, or a chunk is missing or damaged; names the chunk.
        OSError: the file cannot be read.
    """
    assert chunks.sizes is not None
    for part in _written(chunks, out, where):
        known = (key, part.chunk)
        pixels = None if key is None else cache.get(known)
        if pixels is None:
            stored = np.empty(int(chunks.sizes[part.chunk]), np.uint8)
            _fill(fd, stored, part.begin)
            try:
                pixels = decode(codec, stored, chunks.cell, chunks.dtype)
            except ValueError as error:
                raise ValueError(f"{_named(chunks, part)}: {error}") from error
            if key is not None:
                cache.put(known, pixels)
        out[part.outside] = pixels[part.inside]


def _written(chunks: ChunkMap, out: Pixels, where: Where) -> Iterator[ChunkPart]:
    for part in chunks.parts(where, out.shape):
        if part.begin == MISSING:
            raise ValueError(f"{_named(chunks, part)}: it was not written")
        yield part


def _named(chunks: ChunkMap, part: ChunkPart) -> str:
    spatial = len(part.inside)
    number, place = part.chunk[:-spatial], part.chunk[-spatial:]
    starts = zip(("slice", "row", "column")[-spatial:], place, chunks.cell, strict=False)
    at = ", ".join(f"{name} {index * each}" for name, index, each in starts)
    return f"chunk at image {number[0]}, {at}" if number else f"chunk at {at}"


def _fill(fd: int, target: Pixels, offset: int) -> None:
    view = target.reshape(-1).view(np.uint8).data
    while view.nbytes:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise OSError(f"end of file at byte {offset}, expected {view.nbytes} more bytes")
        view, offset = view[count:], offset + count
