"""How many files a process holds open: the slide that was longest not read gives its own back."""

from __future__ import annotations

from threading import Lock
from typing import Protocol

LIMIT = 16
"""Slides open at a time; one holds two or three descriptors, and up to 64 MB of decoded tiles."""


class Holder(Protocol):
    """What holds a file open, and opens it again when it is read next."""

    def release(self) -> bool:
        """Close the file; false if it is just being read."""


class Handles:
    """At most `limit` holders have their files open; more slides than that may be in use.

    ::

        HANDLES.used(slide)  # before every read
        HANDLES.forget(slide)  # when it is closed
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._open: dict[int, Holder] = {}  # longest unused first
        self._lock = Lock()

    def __len__(self) -> int:
        """Holders that have their files open."""
        return len(self._open)

    def used(self, holder: Holder) -> None:
        """Note that a holder opens or reads its file; others are closed for it."""
        with self._lock:
            self._open.pop(id(holder), None)
            for key, other in list(self._open.items()):
                if len(self._open) < self.limit:
                    break
                if other.release():
                    del self._open[key]
            self._open[id(holder)] = holder

    def forget(self, holder: Holder) -> None:
        """Note that a holder was closed."""
        with self._lock:
            self._open.pop(id(holder), None)


HANDLES = Handles()
"""Those of this process."""
