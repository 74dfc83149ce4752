"""One HDF5 file in progress, under a temporary name until it is complete and on disk.

Complete shards are synced and hashed while the next one is written.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import h5py

from spatialdl.data.format import sha256_of, shard_name
from spatialdl.data.samples import ShardInfo
from spatialdl.data.saving import settle, sync

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
        self._waiting: deque[tuple[int, Future[ShardInfo]]] = deque()
        self._settled: dict[int, ShardInfo] = {}

    def add(self, file: ShardFile) -> None:
        """Close a shard and queue it for the thread.

        Raises:
            OSError: this one, or an earlier one, cannot be written.
        """
        file.close()
        while len(self._waiting) >= _MOST_WAITING:
            self._take()
        while self._waiting and self._waiting[0][1].done():
            self._take()
        self._waiting.append((file.number, self._thread.submit(file.settle)))

    def finish(self) -> list[ShardInfo]:
        """Wait for all shards and return their manifest entries, by number.

        Raises:
            OSError: a shard cannot be written.
        """
        while self._waiting:
            self._take()
        self._thread.shutdown()
        return [self._settled[number] for number in sorted(self._settled)]

    def abort(self) -> None:
        """Cancel queued shards; return when no write is in progress."""
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _take(self) -> None:
        number, settled = self._waiting[0]
        self._settled[number] = settled.result()  # a failed one stays queued, to raise again
        self._waiting.popleft()
