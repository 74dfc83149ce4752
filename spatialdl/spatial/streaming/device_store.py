"""Stores for offloaded tensors of an accelerator: pinned host memory, or a disk.

Copies run on two streams beside the one that computes, one for each direction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from spatialdl.comm.allocator import available_memory
from spatialdl.spatial.streaming.store import FileStore, Store, Transfer, bytes_of

Result = TypeVar("Result")

CHUNK = 256 * 2**20
"""Bytes per allocation of pinned memory: a power of two, as PyTorch rounds up to one."""

STAGED = 8
"""Maximum number of staging buffers of pinned memory for copies to or from a disk."""


class PinnedStore(Store):
    """Store of device storages in pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, Path(tempfile.gettempdir()), "pinned host memory")
        self._copies = CopyStreams(device)
        self._chunks: list[Tensor] = []

    @property
    def room(self) -> int:
        """Available memory of the machine, including memory that is already pinned."""
        return available_memory() + len(self._chunks) * CHUNK

    def _store(self, storage: torch.UntypedStorage, start: int) -> Transfer:
        while len(self._chunks) * CHUNK < self._places.end:
            self._chunks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
        return self._copies.out(storage, self._pieces(start, storage.nbytes()))

    def _load(self, start: int, storage: torch.UntypedStorage) -> Transfer:
        return self._copies.back(self._pieces(start, storage.nbytes()), storage)

    def _pieces(self, start: int, nbytes: int) -> list[Tensor]:
        """Slices of the chunks that make up a range of bytes."""
        pieces, stop = [], start + nbytes
        while start < stop:
            chunk, offset = divmod(start, CHUNK)
            end = min(CHUNK, offset + stop - start)
            pieces.append(self._chunks[chunk][offset:end])
            start += end - offset
        return pieces


class DeviceDiskStore(FileStore):
    """Store of device storages in a file, staged in pinned memory; see `FileStore`."""

    def __init__(self, device: torch.device, folder: str | Path | None = None) -> None:
        super().__init__(folder, device)
        self._copies = CopyStreams(device)
        self._staged: list[Future[Any]] = []

    def _store(self, storage: torch.UntypedStorage, start: int) -> Transfer:
        staging = self._staging(storage.nbytes())
        copied = self._copies.out(storage, [staging])

        def write() -> None:
            copied.synchronize()
            self._write(bytes_of(staging.untyped_storage())[: len(staging)], start)

        return _Written(copied, self._submit(self._writer, write))

    def _load(self, start: int, storage: torch.UntypedStorage) -> Transfer:
        staging, queued = self._staging(storage.nbytes()), self._copies.queued()
        box = [storage]

        def read() -> CopyEvent:
            own = box.pop()  # so that this thread never holds the last reference
            self._read(bytes_of(staging.untyped_storage())[: len(staging)], start)
            return self._copies.back([staging], own, queued)

        return _Read(self._submit(self._reader, read))

    def _staging(self, nbytes: int) -> Tensor:
        while len(self._staged) >= STAGED:
            self._staged.pop(0).exception()  # raised by its slot
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], Result]) -> Future[Result]:
        future = thread.submit(work)
        self._staged.append(future)
        return future


class CopyStreams:
    """Copies between a device and pinned memory, for any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def queued(self) -> torch.Event:
        """Event after the work that this thread has queued on the device."""
        return torch.accelerator.current_stream(self._device).record_event()

    def out(self, storage: torch.UntypedStorage, pieces: Sequence[Tensor]) -> CopyEvent:
        """Copy from the device; the storage must not be freed until the copy is done."""
        parts = self._parts(storage, pieces)
        return self._run(self._out, self.queued(), zip(pieces, parts, strict=True))

    def back(
        self,
        pieces: Sequence[Tensor],
        storage: torch.UntypedStorage,
        after: torch.Event | None = None,
    ) -> CopyEvent:
        """Copy to the device, after earlier work on that memory."""
        parts = self._parts(storage, pieces)
        return self._run(self._back, after or self.queued(), zip(parts, pieces, strict=True))

    def _run(
        self, stream: torch.Stream, after: torch.Event, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> CopyEvent:
        stream.wait_event(after)
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return CopyEvent(stream.record_event(), self._device)

    def _parts(self, storage: torch.UntypedStorage, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of a storage's bytes with the lengths of the pieces."""
        values = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return values.split_with_sizes([len(piece) for piece in pieces])


class CopyEvent:
    """A copy on a stream; the host does not wait for it."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class _Written:
    """A copy and its write to disk by a thread; the storage is free after the copy."""

    def __init__(self, copied: CopyEvent, written: Future[None]) -> None:
        self._copied, self._written = copied, written

    def wait(self) -> None:
        self._copied.wait()
        self._written.result()

    def is_done(self) -> bool:
        return self._written.done()


class _Read:
    """A read from disk by a thread, which then starts the copy to the device."""

    def __init__(self, copied: Future[CopyEvent]) -> None:
        self._copied = copied

    def wait(self) -> None:
        self._copied.result().wait()

    def is_done(self) -> bool:
        if not self._copied.done():
            return False
        return self._copied.exception() is not None or self._copied.result().is_done()
