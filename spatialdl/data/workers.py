"""Processes that read batches ahead of the training.

They come from a fork server, an interpreter of its own: to fork a process in which MPI or CUDA has
started is not safe. Batches travel in shared memory, one block each. It is passed on as an open
file (PyTorch's `file_descriptor`, the default on Linux) and has no name that could outlive a
process that is killed; one block keeps those files few.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing import forkserver
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spatialdl.data.batches import Batch, BatchReader, Slice

SHARED = "/dev/shm"
PRELOADED = (
    "spatialdl.data.fork_server",
    "spatialdl.data.dataset_source",
    "spatialdl.data.shards",
    "spatialdl.data.synthetic_masks",
    "spatialdl.data.workers",
    "hydra",
)
"""The last is for the commands: each process imports the main module of its program again."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ALIGNED = 64  # bytes at which a tensor begins


class Workers:
    """Processes that live until `close`, and read what `batches` is asked for.

    Args:
        reader: is pickled and sent to each of them.
        workers: how many.
        prefetch: batches that each of them has read, or is reading, ahead.
    """

    def __init__(self, reader: BatchReader, workers: int, prefetch: int) -> None:
        self._wanted: list[Batch] = []
        self._reader, self._workers, self._prefetch = reader, workers, prefetch
        self._loader: DataLoader[Any] | None = None
        _start_server()  # it imports what it needs while this process goes on

    def batches(self, wanted: Sequence[Batch]) -> Iterator[list[Slice]]:
        """This rank's slices of each batch, in order; one iterator at a time.

        Raises:
            ChildProcessError: one of the processes ended.
            OSError: there is too little shared memory.
            Exception: what the source raised.
        """
        self._wanted[:] = wanted
        found = self._start()
        for number in count():
            try:
                packed = next(found)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
                    raise
                raise ChildProcessError(self._who_ended(error, number)) from None
            if isinstance(packed, BaseException):
                raise packed
            yield unpack(*packed)

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()  # its destructor would, but when, after an error?

    def _start(self) -> Iterator[Any]:
        if self._loader is None:
            atexit.register(self.close)  # they take no SIGTERM, with which Python would end them
            self._loader = DataLoader(
                _Batches(self._reader),
                batch_size=None,
                sampler=self._wanted,
                num_workers=self._workers,
                prefetch_factor=self._prefetch,
                persistent_workers=True,
                multiprocessing_context="forkserver",
                worker_init_fn=_begin,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # or it draws from the one of the training
            )
        try:
            return iter(self._loader)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the data set cannot be sent to processes that read it ({error}): open files "
                "when they are first read and leave them out of its pickle, or take data.workers=0"
            ) from error

    def _who_ended(self, error: Exception, number: int) -> str:
        ahead = self._wanted[number : number + self._workers * self._prefetch]
        samples = [sample for batch in ahead for sample in batch.samples.tolist()]
        shown = ", ".join(map(str, samples[:8])) + (" ..." if len(samples) > 8 else "")
        return (
            f"a process that reads data ended ({error}) while samples {shown} of epoch "
            f"{ahead[0].epoch} were being read: it was killed, perhaps for want of memory (take "
            "fewer data.workers or a smaller data.prefetch), or a file was cut while it was read "
            "(data.io=pread tells which), or could not start (see above); data.workers=0 reads "
            "without processes"
        )


class _Batches(Dataset[Any]):
    """What a worker process holds; its items are batches."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, batch: Batch) -> Any:
        try:
            return pack(self.reader.read(batch))
        except Exception as error:
            return _travelling(error)


def _travelling(error: Exception) -> Any:
    """An error that survives being sent; its traceback comes along as its cause."""
    wrapped = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        notes = " ".join(getattr(error, "__notes__", ()))
        plain = RuntimeError(f"{type(error).__name__}: {error} {notes}")
        return ExceptionWithTraceback(plain, error.__traceback__)
    return wrapped


Packed = tuple[Tensor, list[Slice]]
"""All pixels of a batch as bytes; its slices, with tensors on the device "meta" in their place."""


def pack(batch: list[Slice]) -> Packed:
    """Move the tensors of a batch into one block of shared memory.

    Raises:
        OSError: there is no room.
    """
    tensors = [x for one in batch for x in one.tensors()]
    size = sum(map(_padded, tensors)) or _ALIGNED  # a file of no bytes cannot be mapped
    try:
        block: Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise OSError(_no_room(size, error)) from error
    for part, x in zip(_cut(block, tensors), tensors, strict=True):
        part.copy_(x)
    return block, [one.map(lambda x: torch.empty_like(x, device="meta")) for one in batch]


def unpack(block: Tensor, batch: list[Slice]) -> list[Slice]:
    """The batch, in the block; nothing is copied."""
    tensors = [x for one in batch for x in one.tensors()]
    parts = {id(x): part for x, part in zip(tensors, _cut(block, tensors), strict=True)}
    return [one.map(lambda x: parts[id(x)]) for one in batch]


def _cut(block: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    begin = 0
    for x in tensors:
        bytes_ = block[begin : begin + x.numel() * x.element_size()]
        yield bytes_.view(x.dtype).view(x.shape)
        begin += _padded(x)


def _padded(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


def _no_room(size: int, error: RuntimeError) -> str:
    free = ""
    if os.path.isdir(SHARED):
        status = os.statvfs(SHARED)
        free = f", {status.f_bavail * status.f_frsize / 2**20:.1f} MB are free in {SHARED}"
    return (
        f"no room for a batch of {size / 2**20:.1f} MB in shared memory{free}: take fewer "
        "data.workers, a smaller data.prefetch, or data.workers=0, which needs none; a container "
        f"has more with --shm-size or --ipc=host ({error})"
    )


def _start_server() -> None:
    """With what processes need already imported, and one thread each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with _environment(_ONE_THREAD):
        forkserver.ensure_running()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin(_worker: int) -> None:
    """Take no notice of what launchers and terminals send to everybody; end with the run.

    The fork server has seen to SIGUSR1, and has blocked SIGTERM, which waits here for its reader.
    PyTorch looks whether the fork server has gone, which waits for this process itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # or this would be no worker

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    def end_for_parent() -> None:
        """Which ends its processes by SIGTERM, when it ends itself."""
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    for end in (end_with_parent, end_for_parent):
        threading.Thread(target=end, daemon=True, name=end.__name__).start()


def _as_it_is(item: Any) -> Any:
    return item
