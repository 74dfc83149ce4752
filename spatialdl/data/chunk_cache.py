"""Decoded chunks that were read last, shared by the threads of a process."""

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
    """Arrays by key, as many as a number of bytes allows; the longest unused is dropped first.

    They are not to be written to. A process that was forked begins with an empty one.

    Args:
        most: bytes of all of them together; one that is larger than half of it is not kept.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def __len__(self) -> int:
        """Arrays kept."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self._bytes

    def get(self, key: Hashable) -> Pixels | None:
        """What is kept under a key, if it is."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, chunk: Pixels) -> None:
        """Keep a chunk."""
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
        """Drop all."""
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._bytes = 0


CHUNKS = ChunkCache()
"""That of this process."""
