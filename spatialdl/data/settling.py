"""Shards that are complete, brought to the disk and hashed while the next one is written."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from spatialdl.data.format import ShardInfo
from spatialdl.data.shard_file import ShardFile

_MOST_WAITING = 2  # shards, and their pages that are not on the disk yet


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
