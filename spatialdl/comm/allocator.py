"""Memory of large tensors on CPUs: mapped by itself, in huge pages.

A training step asks for fresh memory for every activation, and most of the price is the first
touch of each page. Pages of 2 MB instead of 4 KB make that cheap, so that less memory need be kept:
glibc, left alone, keeps what is freed in a heap, where tensors of many sizes leave holes.
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
"""PyTorch's own for huge pages. 0, set by the user, leaves glibc as it is, too."""

MAPPED_FROM = 8 * 2**20
KEPT_UP_TO = 64 * 2**20
"""Bytes: from which size memory is mapped by itself; how much free memory a heap may keep."""

NEAR = 0.9
"""Of the most memory in use so far: what a process may take without giving back any."""

HOLES_FROM = 32 * 2**20
"""Bytes: free memory of a heap that is worth to be given back."""

LOOKS_EVERY = 0.05
"""Seconds: to look at a heap takes up to a few tenths of a millisecond."""

ALONE_FROM = 128 * 2**10
"""Bytes: the same for processes whose memory has a limit; what glibc begins with by itself."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_TUNABLES = "GLIBC_TUNABLES"
_GIVEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", _TUNABLES)


def environment() -> dict[str, str]:
    """What to add to the environment of processes that are started; nothing the user has set.

    There glibc itself asks for huge pages. That takes less memory than PyTorch's switch, for which
    every tensor begins at a multiple of 2 MB.
    """
    if _is_left_alone():
        return {}
    return {_TUNABLES: _settings(), SWITCH: "0"}


def prepare() -> None:
    """Set the same in this process, as well as can be once it runs.

    PyTorch reads its switch when it allocates for the first time, so this comes with the import.
    """
    if not sys.platform.startswith("linux") or _is_left_alone():
        return
    os.environ[SWITCH] = "1"
    _set(_M_MMAP_THRESHOLD, MAPPED_FROM)
    _set(_M_TRIM_THRESHOLD, KEPT_UP_TO)


def return_what_is_freed() -> None:
    """From now on, memory of `ALONE_FROM` bytes or more goes back to the system once it is freed.

    Tensors that come and go between others that stay leave holes in a heap: without this, a limit
    on tensors is none on the process.
    """
    if sys.platform.startswith("linux"):
        _set(_M_MMAP_THRESHOLD, ALONE_FROM)


def available_memory() -> int:
    """Bytes of this machine that programs can still take, by Linux's own estimate."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns; bytes.

    Attributes:
        hblkhd: mapped by themselves, all in use.
        uordblks: in use in the heap.
        fordblks: free in the heap.
    """

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Holes:
    """Free memory between memory in use, which goes back to the system near the peak of a step.

    What a forward makes and drops leaves holes between what it keeps. They are used again later,
    but at the peak they would add a quarter to what a rank takes. Given back where a process takes
    less anyhow, they would only have to be mapped again.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._info = getattr(library, "mallinfo2", None)  # since glibc 2.33
        self._trim = getattr(library, "malloc_trim", None)
        self._most = self._beside = 0  # bytes; resident beside the heap: libraries, stacks
        self._next = 0.0
        if self._info is not None:
            self._info.restype = _Heap

    def look(self) -> None:
        """Give them back where it is worth it; called often, as it seldom looks."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOKS_EVERY
            self.give_back()

    def give_back(self) -> bool:
        """Return whether it was worth it."""
        if self._info is None or self._trim is None or not _is_ours():
            return False
        heap = self._info()
        used = heap.hblkhd + heap.uordblks
        self._most = max(self._most, used)
        resident = _resident()
        # of free memory, what was given back before is not resident
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
    """By glibc's mallopt; other libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


@functools.cache
def _is_ours() -> bool:
    """Whether memory is as this module sets it, here or for the ranks that were started."""
    return not _is_left_alone() or os.environ.get(_TUNABLES) == _settings()


def _settings() -> str:
    values = {"hugetlb": 1, "mmap_threshold": MAPPED_FROM, "trim_threshold": KEPT_UP_TO}
    return ":".join(f"glibc.malloc.{name}={value}" for name, value in values.items())


def _is_left_alone() -> bool:
    return os.environ.get(SWITCH, "1") != "1" or any(name in os.environ for name in _GIVEN)
