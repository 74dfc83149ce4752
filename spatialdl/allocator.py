"""Memory that is freed stays with the process, for the next activation of the same size.

The C library gives large buffers back to the operating system as soon as they are freed, and takes
new ones, page by page and filled with zeros, for the next operation. In training, where the same
sizes come again at every step, this costs more than many an operation itself: a copy of 32 MB takes
three times as long into fresh memory as into used memory.
"""

from __future__ import annotations

import ctypes

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, from now on.

    Call it at the start of a program that trains on CPUs; the commands of this package do. It does
    not matter for a GPU, where PyTorch keeps freed memory anyway.

    Returns:
        Whether the C library can do it: glibc does, others leave all as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
