"""Memory of large CPU tensors: mapped separately, in huge pages.

A training step allocates new memory for every activation, and most of the cost is the first touch
of each page. Pages of 2 MB instead of 4 KB make that cheap, so that less free memory must be kept:
glibc by default keeps freed memory in a heap, which tensors of many sizes fragment.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

SWITCH = "THP_MEM_ALLOC_ENABLE"
"""PyTorch's variable for huge pages. If the user sets it to 0, glibc is not configured either."""

MAPPED_FROM = 8 * 2**20
KEPT_UP_TO = 64 * 2**20
"""Bytes: minimum size of separate mappings; maximum free memory that a heap keeps."""

NEAR = 0.9
"""Fraction of peak memory below which free memory is not returned."""

HOLES_FROM = 32 * 2**20
"""Bytes: minimum free memory of a heap that is worth returning."""

LOOKS_EVERY = 0.05
"""Seconds: inspecting a heap takes up to a few tenths of a millisecond."""

ALONE_FROM = 128 * 2**10
"""Bytes: `MAPPED_FROM` for processes with a memory limit; glibc's initial default."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_TUNABLES = "GLIBC_TUNABLES"
_USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", _TUNABLES)


def environment() -> dict[str, str]:
    """Environment variables for processes to start; empty if the user has set any of them.

    There glibc itself requests huge pages. This takes less memory than PyTorch's variable, which
    aligns every tensor to 2 MB.
    """
    if _is_set_by_user():
        return {}
    return {_TUNABLES: _settings(), SWITCH: "0"}


def prepare() -> None:
    """Apply the closest settings that are possible in a running process.

    PyTorch reads its variable at the first allocation, so this runs at import.
    """
    if not sys.platform.startswith("linux") or _is_set_by_user():
        return
    os.environ[SWITCH] = "1"
    _set(_M_MMAP_THRESHOLD, MAPPED_FROM)
    _set(_M_TRIM_THRESHOLD, KEPT_UP_TO)


def return_freed_memory() -> None:
    """Return memory blocks of `ALONE_FROM` bytes or more to the system once they are freed.

    Short-lived tensors between long-lived ones fragment a heap: without this, a limit on tensor
    memory does not limit the process.
    """
    if sys.platform.startswith("linux"):
        _set(_M_MMAP_THRESHOLD, ALONE_FROM)


def available_memory() -> int:
    """Bytes of this machine that programs can still allocate, by Linux's estimate."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


class _Heap(ctypes.Structure):
    """Result of glibc's mallinfo2, in bytes.

    Attributes:
        hblkhd: separate mappings, all in use.
        uordblks: used memory of the heap.
        fordblks: free memory of the heap.
    """

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Holes:
    """Free memory between used memory, returned to the system near the peak of a step.

    Temporary tensors of a forward leave holes between saved ones. Later allocations reuse the
    holes, but at the peak they would add a quarter to a rank's memory. Returned below the peak,
    they would only have to be mapped again.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._info = getattr(library, "mallinfo2", None)  # since glibc 2.33
        self._trim = getattr(library, "malloc_trim", None)
        self._most = self._beside = 0  # bytes; resident outside the heap: libraries, stacks
        self._next = 0.0
        if self._info is not None:
            self._info.restype = _Heap

    def poll(self) -> None:
        """Return holes if worthwhile; cheap to call often, as it inspects seldom."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOKS_EVERY
            self.give_back()

    def give_back(self) -> bool:
        """Return whether memory was given back."""
        if self._info is None or self._trim is None or not _is_ours():
            return False
        heap = self._info()
        used = heap.hblkhd + heap.uordblks
        self._most = max(self._most, used)
        resident = _resident()
        # free memory that was given back before is not resident
        holes = min(heap.fordblks, resident - used - self._beside)
        if holes < HOLES_FROM or resident < NEAR * (self._most + self._beside):
            return False
        self._trim(0)
        self._beside = _resident() - used
        return True


def _resident() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _set(parameter: int, value: int) -> None:
    """Call glibc's mallopt; other C libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


@functools.cache
def _is_ours() -> bool:
    """Whether this module configured memory, here or for launched ranks."""
    return not _is_set_by_user() or os.environ.get(_TUNABLES) == _settings()


def _settings() -> str:
    values = {"hugetlb": 1, "mmap_threshold": MAPPED_FROM, "trim_threshold": KEPT_UP_TO}
    return ":".join(f"glibc.malloc.{name}={value}" for name, value in values.items())


def _is_set_by_user() -> bool:
    return os.environ.get(SWITCH, "1") != "1" or any(name in os.environ for name in _USER_SETTINGS)
