"""Files with the pixels of a slide; of many, the least recently read ones are closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from threading import Lock, RLock

import numpy as np
import numpy.typing as npt

from spatialdl.slides.reading.native import JpegGrid

Bytes = npt.NDArray[np.uint8]

LIMIT = 16
"""Slides open at a time; each has two or three descriptors and up to 64 MB of decoded tiles."""


class PixelSource(ABC):
    """A file with pixels, which may be closed between reads and is reopened on demand.

    Reads hold `_lock` and call `HANDLES.used(self)` first.

    Attributes:
        size: rows and columns at level 0.
        downsamples: level-0 pixels per pixel of each level.
        properties: metadata by openslide's names.
        background: colour of places without pixels.
        remark: irregularities of the file.
        is_patchy: whether some box read so far had places without pixels.
    """

    size: tuple[int, int]
    downsamples: tuple[float, ...] = (1.0,)
    properties: Mapping[str, str]
    background: tuple[int, int, int] = (255, 255, 255)
    remark = ""
    is_patchy = False

    def __init__(self) -> None:
        self._lock = RLock()

    @abstractmethod
    def read(self, x: int, y: int, level: int, size: tuple[int, int], again: bool) -> Bytes:
        """Read a box of a level over the background.

        Args:
            x: level-0 column of the top-left corner, may be negative.
            y: level-0 row of the corner.
            level: of the slide.
            size: rows and columns, in pixels of the level.
            again: repeat a failed read once, with a new handle.

        Returns:
            uint8 (rows, cols, 3).

        Raises:
            SlideError: the file is damaged there.
        """

    def is_native(self, level: int) -> bool:
        """Whether a level is read without openslide."""
        return True

    def jpeg_grid(self, level: int) -> JpegGrid | None:
        """Return the JPEG tiles of a level, not decoded; None if it is not read from JPEG tiles."""
        return None

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
        self._open: dict[int, PixelSource] = {}  # least recently used first
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of open files."""
        return len(self._open)

    def used(self, file: PixelSource) -> None:
        """Mark a file as most recently used, and close the least recently used ones."""
        with self._lock:
            self._open.pop(id(file), None)
            for key, other in list(self._open.items()):
                if len(self._open) < self.limit:
                    break
                if other.release():
                    del self._open[key]
            self._open[id(file)] = file

    def forget(self, file: PixelSource) -> None:
        """Remove a closed file."""
        with self._lock:
            self._open.pop(id(file), None)


HANDLES = Handles()
"""The open slides of this process."""
