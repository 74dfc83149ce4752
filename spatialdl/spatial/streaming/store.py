"""Store for offloaded tensors of virtual tiles: an unnamed file.

The file disappears when the process ends, even by a signal. Background threads write and read.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import weakref
from bisect import bisect_left
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

PAGE = 4096
"""Bytes to which a slot is rounded up."""


class Transfer(Protocol):
    """A transfer to or from a store."""

    def wait(self) -> None:
        """Make later work of this thread wait for the transfer.

        Raises:
            OSError: if the disk is full or fails.
        """

    def is_done(self) -> bool:
        """Whether it has completed or failed; does not wait."""


@dataclass
class Slot:
    """A range of bytes in a store, and its current transfer."""

    start: int
    size: int
    transfer: Transfer | None = field(default=None, compare=False)

    def wait(self) -> None:
        """Wait for the current transfer; raises the errors of `Transfer.wait`."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.wait()

    def is_done(self) -> bool:
        return self.transfer is None or self.transfer.is_done()


class Places:
    """Allocates slots in a range of bytes, which grows if no free slot is large enough."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # starts and sizes in order, never adjacent

    def take(self, nbytes: int) -> Slot:
        """Allocate by first fit, or at the end."""
        size = -(-nbytes // PAGE) * PAGE
        for at, (start, available) in enumerate(self._free):
            if available >= size:
                self._free[at : at + 1] = [(start + size, available - size)][: available > size]
                return Slot(start, size)
        start = self.end
        if self._free and sum(self._free[-1]) == start:
            start = self._free.pop()[0]
        self.end = start + size
        return Slot(start, size)

    def free(self, slot: Slot) -> None:
        """Release a slot and merge it with adjacent free ones."""
        start, size = slot.start, slot.size
        at = bisect_left(self._free, (start, size))
        if at < len(self._free) and self._free[at][0] == start + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == start:
            at -= 1
            before = self._free.pop(at)
            start, size = before[0], before[1] + size
        self._free.insert(at, (start, size))


class Store:
    """Stores the bytes of storages; for one thread at a time.

    Args:
        device: the accelerator of its tensors; None for the CPU.
        folder: for other files of similar size.
        place: description for messages.

    Attributes:
        device, folder, place: as given.
        written, read: bytes so far.
    """

    def __init__(self, device: torch.device | None, folder: Path, place: str) -> None:
        self.device, self.folder, self.place = device, folder, place
        self.written = self.read = 0
        self._places = Places()

    @property
    def peak(self) -> int:
        """Maximum size in bytes, including unused slots."""
        return self._places.end

    @property
    def room(self) -> int:
        """Bytes that it can still take."""
        raise NotImplementedError

    def put(self, storage: torch.UntypedStorage) -> Slot:
        """Start to store a storage, which must not be freed or changed until the slot is done."""
        slot = self._places.take(storage.nbytes())
        slot.transfer = self._store(storage, slot.start)
        self.written += storage.nbytes()
        return slot

    def get(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """Start to load the bytes of a slot that is done.

        The storage must not be used until the slot is done again.
        """
        slot.transfer = self._load(slot.start, storage)
        self.read += storage.nbytes()

    def free(self, slot: Slot) -> None:
        """Release a slot without a transfer."""
        self._places.free(slot)

    def _store(self, storage: torch.UntypedStorage, start: int) -> Transfer:
        raise NotImplementedError

    def _load(self, start: int, storage: torch.UntypedStorage) -> Transfer:
        raise NotImplementedError


class FileStore(Store):
    """Base of stores in an unnamed file, closed at the latest when the store is freed.

    Args:
        folder: on a disk with free space; by default that for temporary files (`TMPDIR`).
        device: see `Store`.

    Raises:
        ValueError: if no file can be created there.
    """

    def __init__(self, folder: str | Path | None, device: torch.device | None) -> None:
        folder = Path(folder or tempfile.gettempdir())
        super().__init__(device, folder, str(folder))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="spatialdl-stream-")  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"cannot store tensors in {folder}: {error.strerror}; take another folder"
            ) from error
        # nobody closes the store of a network that is dropped
        weakref.finalize(self, self._file.close)
        # separate threads, so that reads do not queue behind writes
        self._writer = ThreadPoolExecutor(1, "spatialdl-stream-write")
        self._reader = ThreadPoolExecutor(1, "spatialdl-stream-read")

    @property
    def room(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self.folder).free

    def _write(self, memory: memoryview, start: int) -> None:
        """Write bytes; raises OSError if the disk is full or fails."""
        done = 0
        try:
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], start + done)
        except OSError as error:
            size = os.fstat(self._file.fileno()).st_size
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.folder}, where {size / 1e9:.1f} GB of tensors are "
                "stored; take a folder on a disk with more free space",
            ) from error

    def _read(self, memory: memoryview, start: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:]], start + done)
            if not count:
                raise OSError(f"tensors stored in {self.folder} are missing: the file is too short")
            done += count


class DiskStore(FileStore):
    """Store of CPU storages in an unnamed file; see `FileStore`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder, None)

    def _store(self, storage: torch.UntypedStorage, start: int) -> Transfer:
        return InThread(self._writer.submit(self._write, bytes_of(storage), start))

    def _load(self, start: int, storage: torch.UntypedStorage) -> Transfer:
        return InThread(self._reader.submit(self._read, bytes_of(storage), start))


class InThread:
    """A transfer in a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a CPU storage."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
