"""Limit on the open slides of a process: the least recently read one is closed first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import Lock, RLock

LIMIT = 16
"""Slides open at a time; each has two or three descriptors and up to 64 MB of decoded tiles."""


class ReopenedFile(ABC):
    """A file that may be closed between reads and is reopened on demand.

    Reads hold `_lock` and call `HANDLES.used(self)` first.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def release(self) -> bool:
        """Close the file until the next read; false if it is being read."""
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
        """Release files and memory."""


class Handles:
    """LRU set of open files, at most `limit`; more slides than that may be in use.

    ::

        HANDLES.used(slide)  # before every read
        HANDLES.forget(slide)  # when it is closed
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._open: dict[int, ReopenedFile] = {}  # least recently used first
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of open files."""
        return len(self._open)

    def used(self, file: ReopenedFile) -> None:
        """Mark a file as most recently used, and close the least recently used ones."""
        with self._lock:
            self._open.pop(id(file), None)
            for key, other in list(self._open.items()):
                if len(self._open) < self.limit:
                    break
                if other.release():
                    del self._open[key]
            self._open[id(file)] = file

    def forget(self, file: ReopenedFile) -> None:
        """Remove a closed file."""
        with self._lock:
            self._open.pop(id(file), None)


HANDLES = Handles()
"""The open slides of this process."""
