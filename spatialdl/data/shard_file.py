"""One HDF5 file being written: under a temporary name until it is whole and on the disk.

Shards that are complete are brought to the disk and hashed while the next one is written.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import h5py

from spatialdl.data.format import ShardInfo, sha256_of, shard_name
from spatialdl.data.saving import settle, sync

_PAGE = 4096
_ALIGNED_FROM = 2**17  # bytes; of less the padding would be felt
_MOST_WAITING = 2  # shards, and their pages that are not on the disk yet


class ImageRows(Protocol):
    """An image that is read by rows, such as a memory map or a slide: `image[row0:row1]`.

    One of other than bytes has a `dtype`, too.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols, channels) or (rows, cols)."""

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows as an array."""


class ShardFile:
    """A shard in progress.

    Args:
        folder: where it is written.
        number: its place in the manifest, and in its name.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.samples = 0
        self.bytes = 0  # of pixels, as stored
        self._final = folder / shard_name(number)
        self._temporary = self._final.with_suffix(".h5.tmp")
        # windows are copied a tenth faster out of a memory map whose chunks begin with a page
        self.h5 = h5py.File(
            self._temporary, "w", alignment_threshold=_ALIGNED_FROM, alignment_interval=_PAGE
        )

    def finish(self) -> ShardInfo:
        """Close and settle."""
        self.close()
        return self.settle()

    def close(self) -> None:
        """Write what is left; nothing can be added then."""
        self.h5.close()

    def settle(self) -> ShardInfo:
        """Sync and rename a closed shard, in any thread; returns what the manifest says of it."""
        with ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
            synced = thread.submit(sync, self._temporary)
            digest = sha256_of(self._temporary)  # meanwhile: the pages are in memory still
            synced.result()
        settle(self._temporary, self._final)
        return ShardInfo(self._final.name, self._final.stat().st_size, digest, self.samples)

    def abort(self) -> None:
        """Close without keeping anything."""
        with suppress(OSError, RuntimeError):  # a full disk cannot take what is left to write
            self.h5.close()


class Settling:
    """A thread that settles shards, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="settling")
        self._waiting: deque[tuple[int, Future[ShardInfo]]] = deque()
        self._settled: dict[int, ShardInfo] = {}

    def add(self, file: ShardFile) -> None:
        """Close a shard; the rest happens meanwhile.

        Raises:
            OSError: this one, or one before it, cannot be written.
        """
        file.close()
        while len(self._waiting) >= _MOST_WAITING:
            self._take()
        while self._waiting and self._waiting[0][1].done():
            self._take()
        self._waiting.append((file.number, self._thread.submit(file.settle)))

    def finish(self) -> list[ShardInfo]:
        """Wait for all; what the manifest says of them, in the order of their numbers.

        Raises:
            OSError: one of them cannot be written.
        """
        while self._waiting:
            self._take()
        self._thread.shutdown()
        return [self._settled[number] for number in sorted(self._settled)]

    def abort(self) -> None:
        """Begin no other; return when nothing is written any more."""
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _take(self) -> None:
        number, settled = self._waiting[0]
        self._settled[number] = settled.result()  # what failed stays, and fails again
        self._waiting.popleft()
