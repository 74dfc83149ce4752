"""What of a file is in memory, and how to have it there no more."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_PAGE = os.sysconf("SC_PAGESIZE")


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to forget files that are on the disk and that nobody has mapped."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident(paths: Iterable[Path]) -> float:
    """The share of files' pages that is in memory, by mincore(2).

    Raises:
        OSError: the system does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = found = 0
    for path in paths:
        mapped = np.memmap(path, np.uint8, "r")
        seen = np.zeros(-(-len(mapped) // _PAGE), np.uint8)
        begin, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
        if libc.mincore(begin, size, ctypes.c_void_p(seen.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += len(seen)
        found += int(np.count_nonzero(seen & 1))
    return found / pages
