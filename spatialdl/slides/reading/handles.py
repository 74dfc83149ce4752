"""How many files a process holds open: the slide that was longest not read gives its own back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import Lock, RLock

LIMIT = 16
"""Slides open at a time; one holds two or three descriptors, and up to 64 MB of decoded tiles."""


class ReopenedFile(ABC):
    """What holds a file open, and opens it again when it is read next.

    It reads under `_lock`, and calls `HANDLES.used(self)` before.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def release(self) -> bool:
        """Close the file until it is read again; false if it is just being read."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._let_go()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            HANDLES.forget(self)
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Give files and memory back."""


class Handles:
    """At most `limit` holders have their files open; more slides than that may be in use.

    ::

        HANDLES.used(slide)  # before every read
        HANDLES.forget(slide)  # when it is closed
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._open: dict[int, ReopenedFile] = {}  # longest unused first
        self._lock = Lock()

    def __len__(self) -> int:
        """Holders that have their files open."""
        return len(self._open)

    def used(self, holder: ReopenedFile) -> None:
        """Note that a holder opens or reads its file; others are closed for it."""
        with self._lock:
            self._open.pop(id(holder), None)
            for key, other in list(self._open.items()):
                if len(self._open) < self.limit:
                    break
                if other.release():
                    del self._open[key]
            self._open[id(holder)] = holder

    def forget(self, holder: ReopenedFile) -> None:
        """Note that a holder was closed."""
        with self._lock:
            self._open.pop(id(holder), None)


HANDLES = Handles()
"""Those of this process."""
