"""Reads of raw or compressed chunks through a memory map or by `pread`.

A memory map is faster: pixels are copied from the page cache to their destination without a buffer
between. But if the file is truncated or its disk fails, the process that touches the page is killed
(SIGBUS) instead of receiving an error, and on network file systems each missing page is a separate
request. There `pread` is safer: it requests whole chunks and reports errors.
"""

from __future__ import annotations

import mmap
import os
import re
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.data.chunk_map import MISSING, ChunkMap, ChunkPart, Where

Bytes = npt.NDArray[np.uint8]
Pixels = npt.NDArray[Any]
Io = Literal["auto", "mmap", "pread", "h5py"]
IOS: tuple[Io, ...] = ("auto", "mmap", "pread", "h5py")

MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"),
    *("tmpfs", "ramfs", "rootfs", "overlay", "aufs", "squashfs", "erofs", "iso9660", "exfat"),
}


class RawFile(Protocol):
    """An open file from which boxes are copied."""

    def read(self, chunks: ChunkMap, out: Pixels, where: Where) -> list[ChunkPart]:
        """Copy a box of a dataset to `out`; return the parts whose chunks were never written."""

    def stored(self, begin: int, size: int) -> Bytes:
        """The stored bytes of a chunk."""

    def forget(self) -> None:
        """Release the memory that has been read."""


class MappedFile:
    """A memory-mapped file; `fd` may be closed once it is mapped."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def read(self, chunks: ChunkMap, out: Pixels, where: Where) -> list[ChunkPart]:
        cell, dtype, flat = chunks.cell, chunks.dtype, self._bytes
        size = prod(cell) * dtype.itemsize
        missing = []
        for part in chunks.parts(where, out.shape):
            _, begin, inside, outside = part
            if begin == MISSING:
                missing.append(part)
            else:
                out[outside] = flat[begin : begin + size].view(dtype).reshape(cell)[inside]
        return missing

    def stored(self, begin: int, size: int) -> Bytes:
        return self._bytes[begin : begin + size]

    def forget(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            # The pages stay in the page cache but no longer count as memory of this process.
            self._map.madvise(mmap.MADV_DONTNEED)


class PreadFile:
    """A file read through its descriptor `fd`, which must stay open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, chunks: ChunkMap, out: Pixels, where: Where) -> list[ChunkPart]:
        cell = chunks.cell
        line = prod(cell[1:]) * chunks.dtype.itemsize  # bytes of a chunk's row (or slice)
        buffer: Pixels | None = None
        missing = []
        for part in chunks.parts(where, out.shape):
            _, begin, (rows, *others), outside = part
            if begin == MISSING:
                missing.append(part)
                continue
            target = out[outside]
            offset = begin + rows.start * line
            whole = all(cut.stop - cut.start == n for cut, n in zip(others, cell[1:], strict=False))
            if target.flags.c_contiguous and whole:
                self._fill(target, offset)
                continue
            if buffer is None:
                buffer = np.empty(cell, chunks.dtype)
            whole_rows = buffer[: rows.stop - rows.start]
            self._fill(whole_rows, offset)
            target[...] = whole_rows[(slice(None), *others)]
        return missing

    def stored(self, begin: int, size: int) -> Bytes:
        buffer = np.empty(size, np.uint8)
        self._fill(buffer, begin)
        return buffer

    def forget(self) -> None:
        """Do nothing: this reader keeps no memory."""

    def _fill(self, target: Pixels, offset: int) -> None:
        view = target.reshape(-1).view(np.uint8).data
        while view.nbytes:
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise OSError(f"end of file at byte {offset}, expected {view.nbytes} more bytes")
            view, offset = view[count:], offset + count


def open_raw(fd: int, path: Path, io: Io) -> RawFile:
    """Create the reader for an open file.

    Args:
        fd: its descriptor.
        path: its path, from which "auto" determines the file system.
        io: "mmap", "pread", or "auto" for the better of them on that file system.

    Raises:
        OSError: `io` is "mmap" and the file cannot be mapped.
    """
    if io == "mmap":
        return MappedFile(fd)
    if io == "auto" and is_local(path):
        try:
            return MappedFile(fd)
        except (OSError, ValueError):  # not every file system supports mmap
            pass
    return PreadFile(fd)


def is_local(path: Path) -> bool:
    """Whether a file is on a local file system; False if unknown."""
    return file_system(path) in _LOCAL


def file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system of a file, such as "ext4" or "lustre"; None if unknown.

    Args:
        path: the file.
        mounts: the mount table (proc_pid_mountinfo(5)), available on Linux.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    real = path.resolve()
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        # Of two mounts at one point, the later one hides the earlier one.
        if real.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), right.split()[0]
    return None if found is None else found[1]


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
