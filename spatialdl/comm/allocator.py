"""Memory of large tensors on CPUs: mapped by itself, in huge pages.

A training step asks for fresh memory for every activation, and most of the price is the first
touch of each page. Pages of 2 MB instead of 4 KB make that cheap, so that less memory need be kept:
glibc, left alone, keeps what is freed in a heap, where tensors of many sizes leave holes.
"""

from __future__ import annotations

import ctypes
import os
import sys

SWITCH = "THP_MEM_ALLOC_ENABLE"
"""PyTorch's own for huge pages. 0, set by the user, leaves glibc as it is, too."""

MAPPED_FROM = 8 * 2**20
KEPT_UP_TO = 64 * 2**20
"""Bytes: from which size memory is mapped by itself; how much free memory a heap may keep."""

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
    values = {"hugetlb": 1, "mmap_threshold": MAPPED_FROM, "trim_threshold": KEPT_UP_TO}
    settings = ":".join(f"glibc.malloc.{name}={value}" for name, value in values.items())
    return {_TUNABLES: settings, SWITCH: "0"}


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


def _set(parameter: int, value: int) -> None:
    """By glibc's mallopt; other libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


def _is_left_alone() -> bool:
    return os.environ.get(SWITCH, "1") != "1" or any(name in os.environ for name in _GIVEN)
