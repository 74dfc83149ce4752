"""Where tensors lie that no virtual tile needs now: a file without a name.

It is gone when the process ends, however it ends. Bytes are written and read by threads beside the
one that computes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from bisect import bisect_left
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

PAGE = 4096
"""Bytes to which a place in a store is rounded up."""


class Transfer(Protocol):
    """Bytes on their way into a store or out of it."""

    def wait(self) -> None:
        """Until they are there, for all that this thread does afterwards.

        Raises:
            OSError: the disk is full, or fails.
        """

    def is_done(self) -> bool:
        """Whether they are there, or have failed; does not wait."""


@dataclass
class Slot:
    """A place in a store, in bytes, and what is on its way there or back."""

    start: int
    size: int
    transfer: Transfer | None = field(default=None, compare=False)

    def wait(self) -> None:
        """Until nothing is on its way; raises what `Transfer.wait` raises."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.wait()

    def is_done(self) -> bool:
        return self.transfer is None or self.transfer.is_done()


class Store(Protocol):
    """Keeps bytes of storages; for one thread at a time.

    Attributes:
        device: the accelerator whose tensors it takes; None for those of a CPU.
        place: what it is, in messages.
        folder: for files of what is as large besides.
        written, read: bytes so far.
        peak: bytes that it has had at most.
        room: bytes that it can still take.
    """

    device: torch.device | None
    place: str
    folder: Path
    written: int
    read: int

    @property
    def peak(self) -> int: ...

    @property
    def room(self) -> int: ...

    def put(self, storage: torch.UntypedStorage) -> Slot:
        """Begin to store it; it must live, and stay as it is, until the slot is done."""

    def get(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """Begin to bring the bytes back; nobody else may use the storage until the slot is done."""

    def free(self, slot: Slot) -> None:
        """The place may be used again; nothing is on its way there."""

    def close(self) -> None: ...


class Places:
    """Slots in a row of bytes that grows where no free one is large enough."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # starts and sizes in order, none beside another

    def take(self, nbytes: int) -> Slot:
        """The first free place that is large enough, or one at the end."""
        size = -(-nbytes // PAGE) * PAGE
        for at, (start, found) in enumerate(self._free):
            if found >= size:
                self._free[at : at + 1] = [(start + size, found - size)][: found > size]
                return Slot(start, size)
        start = self.end
        if self._free and sum(self._free[-1]) == start:
            start = self._free.pop()[0]
        self.end = start + size
        return Slot(start, size)

    def free(self, slot: Slot) -> None:
        """The place may be used again, together with free ones beside it."""
        start, size = slot.start, slot.size
        at = bisect_left(self._free, (start, size))
        if at < len(self._free) and self._free[at][0] == start + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == start:
            at -= 1
            before = self._free.pop(at)
            start, size = before[0], before[1] + size
        self._free.insert(at, (start, size))


class File:
    """A file without a name in a folder.

    Raises:
        ValueError: none can be made there.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="spatialdl-stream-")  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"cannot store tensors in {self.folder}: {error.strerror}; name another folder"
            ) from error

    @property
    def room(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self.folder).free

    def write(self, memory: memoryview, start: int) -> None:
        """Raises OSError where the disk is full, or fails."""
        done = 0
        try:
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], start + done)
        except OSError as error:
            size = os.fstat(self._file.fileno()).st_size
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.folder}, where {size / 1e9:.1f} GB of tensors are "
                "stored; name a folder on a disk with more room",
            ) from error

    def read(self, memory: memoryview, start: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:]], start + done)
            if not count:
                raise OSError(f"what was stored in {self.folder} is not there any more")
            done += count

    def close(self) -> None:
        self._file.close()


class FileStore:
    """What stores in a file of a folder share, whosever tensors they take; see `Store`.

    Args:
        folder: on a disk with room; by default that for temporary files (`TMPDIR`).
        device: see `Store`.

    Raises:
        ValueError: no file can be made there.
    """

    def __init__(self, folder: str | Path | None, device: torch.device | None) -> None:
        self._file, self._places = File(folder), Places()
        self.device = device
        self.folder, self.place = self._file.folder, str(self._file.folder)
        self.written = self.read = 0
        # of their own, so that what is needed now does not wait for what was needed before
        self._writer = ThreadPoolExecutor(1, "spatialdl-stream-write")
        self._reader = ThreadPoolExecutor(1, "spatialdl-stream-read")

    @property
    def peak(self) -> int:
        return self._places.end

    @property
    def room(self) -> int:
        return self._file.room

    def free(self, slot: Slot) -> None:
        self._places.free(slot)

    def close(self) -> None:
        for each in (self._writer, self._reader):
            each.shutdown()
        self._file.close()


class DiskStore(FileStore):
    """Bytes of storages of a CPU in a file on `folder`, which is never seen there.

    Args:
        folder: on a disk with room; by default that for temporary files (`TMPDIR`).

    Raises:
        ValueError: no file can be made there.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder, None)

    def put(self, storage: torch.UntypedStorage) -> Slot:
        slot, memory = self._places.take(storage.nbytes()), bytes_of(storage)
        slot.transfer = InThread(self._writer.submit(self._file.write, memory, slot.start))
        self.written += len(memory)
        return slot

    def get(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        memory = bytes_of(storage)
        slot.transfer = InThread(self._reader.submit(self._file.read, memory, slot.start))
        self.read += len(memory)


class InThread:
    """A transfer that a thread makes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a storage of a CPU."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
