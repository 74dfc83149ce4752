"""Where tensors lie that no virtual rank needs now: a file without a name.

It is gone when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

import torch

_PAGE = 4096


class Slot(NamedTuple):
    """A place in the file, in bytes."""

    start: int
    size: int


class DiskStore:
    """Bytes of storages in a file on `folder`, which is never seen there.

    Args:
        folder: on a disk with room; by default that for temporary files (`TMPDIR`).

    Attributes:
        written, read: bytes so far.
        peak: bytes that the file has had at most.

    Raises:
        ValueError: no file can be made there.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="spatialdl-stream-")  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"cannot store tensors in {self.folder}: {error.strerror}; name another folder"
            ) from error
        self._end = self.written = self.read = 0
        self._free: list[Slot] = []  # in order, none beside another

    @property
    def peak(self) -> int:
        return self._end

    @property
    def room(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self.folder).free

    def put(self, storage: torch.UntypedStorage) -> Slot:
        """Write the bytes of a storage.

        Raises:
            OSError: the disk is full, or fails.
        """
        slot = self._take(storage.nbytes())
        memory, done = _bytes_of(storage), 0
        try:
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], slot.start + done)
        except OSError as error:
            self.free(slot)
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.folder}, where {self._end / 1e9:.1f} GB of tensors are "
                "stored; name a folder on a disk with more room",
            ) from error
        self.written += len(memory)
        return slot

    def get(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """Read them back into a storage of their size."""
        memory, done = _bytes_of(storage), 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:]], slot.start + done)
            if not count:
                raise OSError(f"what was stored in {self.folder} is not there any more")
            done += count
        self.read += len(memory)

    def free(self, slot: Slot) -> None:
        """The place may be used again, together with free ones beside it."""
        start, size = slot
        at = bisect_left(self._free, slot)
        if at < len(self._free) and self._free[at].start == start + size:
            size += self._free.pop(at).size
        if at and sum(self._free[at - 1]) == start:
            at -= 1
            before = self._free.pop(at)
            start, size = before.start, before.size + size
        self._free.insert(at, Slot(start, size))

    def close(self) -> None:
        self._file.close()

    def _take(self, nbytes: int) -> Slot:
        """The first free place that is large enough, or one at the end."""
        size = -(-nbytes // _PAGE) * _PAGE
        for at, (start, found) in enumerate(self._free):
            if found >= size:
                self._free[at : at + 1] = [Slot(start + size, found - size)][: found > size]
                return Slot(start, size)
        start = self._end
        if self._free and sum(self._free[-1]) == start:
            start = self._free.pop().start
        self._end = start + size
        return Slot(start, size)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
