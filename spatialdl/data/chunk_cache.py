"""Cache of decoded chunks, shared by the threads of a process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy.typing as npt

Pixels = npt.NDArray[Any]
_MOST = 64 * 2**20  # bytes


class ChunkCache:
    """LRU cache of read-only arrays with a limit in bytes.

    A forked process starts with an empty cache.

    Args:
        most: maximum total bytes; an array larger than half of it is not cached.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def __len__(self) -> int:
        """Number of cached arrays."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Total bytes of the cached arrays."""
        return self._bytes

    def get(self, key: Hashable) -> Pixels | None:
        """The cached array of a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, chunk: Pixels) -> None:
        """Cache a chunk and make it read-only."""
        if chunk.nbytes > self._most // 2:
            return
        chunk.flags.writeable = False
        with self._lock:
            before = self._kept.pop(key, None)
            self._bytes += chunk.nbytes - (0 if before is None else before.nbytes)
            self._kept[key] = chunk
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Remove all arrays."""
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._bytes = 0


CHUNKS = ChunkCache()
"""The cache of this process."""
