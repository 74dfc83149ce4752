"""Worker processes that prefetch batches.

They are children of a fork server, a separate interpreter: forking a process in which MPI or CUDA
is initialised is not safe. Batches are passed in shared memory, one block each, as an open file
(PyTorch's `file_descriptor`, the default on Linux). It has no name that could outlive a killed
process; one block per batch keeps the number of files low.
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
    "spatialdl.data.synthetic",
    "spatialdl.data.workers",
    "hydra",
)
"""`hydra` is for the commands: each worker imports the main module of its program again."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_AHEAD = 2  # batches that each process reads ahead
_ALIGNED = 64  # alignment of tensors in a block, bytes


class Workers:
    """Worker processes that live until `close` and read the batches that `batches` requests.

    Args:
        reader: is pickled and sent to each process.
        workers: number of processes.
    """

    def __init__(self, reader: BatchReader, workers: int) -> None:
        self._wanted: list[Batch] = []
        self._reader, self._workers = reader, workers
        self._loader: DataLoader[Any] | None = None
        _start_server()  # its imports run while this process continues

    def batches(self, wanted: Sequence[Batch]) -> Iterator[list[Slice]]:
        """This rank's slices of each batch, in order; one iterator at a time.

        Raises:
            ChildProcessError: a worker process exited.
            OSError: not enough shared memory.
            Exception: any error of the source.
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
                raise ChildProcessError(self._death_message(error, number)) from None
            if isinstance(packed, BaseException):
                raise packed
            yield unpack(*packed)

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()  # after an error its destructor may run late

    def _start(self) -> Iterator[Any]:
        if self._loader is None:
            atexit.register(self.close)  # workers ignore SIGTERM from multiprocessing at exit
            self._loader = DataLoader(
                _Batches(self._reader),
                batch_size=None,
                sampler=self._wanted,
                num_workers=self._workers,
                prefetch_factor=_AHEAD,
                persistent_workers=True,
                multiprocessing_context="forkserver",
                worker_init_fn=_init_worker,
                collate_fn=_identity,
                generator=torch.Generator(),  # else it draws from the training's generator
            )
        try:
            return iter(self._loader)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the data set cannot be pickled for worker processes ({error}): open files on "
                "first read and leave them out of its pickle, or set data.workers=0"
            ) from error

    def _death_message(self, error: Exception, number: int) -> str:
        ahead = self._wanted[number : number + self._workers * _AHEAD]
        samples = [sample for batch in ahead for sample in batch.samples.tolist()]
        shown = ", ".join(map(str, samples[:8])) + (" ..." if len(samples) > 8 else "")
        return (
            f"a worker process exited ({error}) while reading samples {shown} of epoch "
            f"{ahead[0].epoch}: it was killed, perhaps by the out-of-memory killer (reduce "
            "data.workers), or it could not start (see above); data.workers=0 "
            "reads without worker processes"
        )


class _Batches(Dataset[Any]):
    """The data set of a worker process; its items are batches."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, batch: Batch) -> Any:
        try:
            return pack(self.reader.read(batch))
        except Exception as error:
            return _sendable(error)


def _sendable(error: Exception) -> Any:
    """An error that can be pickled, with its traceback as its cause."""
    wrapped = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        notes = " ".join(getattr(error, "__notes__", ()))
        plain = RuntimeError(f"{type(error).__name__}: {error} {notes}")
        return ExceptionWithTraceback(plain, error.__traceback__)
    return wrapped


Packed = tuple[Tensor, list[Slice]]
"""All tensors of a batch as bytes; its slices, with placeholders on the device "meta"."""


def pack(batch: list[Slice]) -> Packed:
    """Move the tensors of a batch into one block of shared memory.

    Raises:
        OSError: not enough shared memory.
    """
    tensors = [x for part in batch for x in part.tensors()]
    size = sum(map(_padded, tensors)) or _ALIGNED  # an empty file cannot be mapped
    try:
        block: Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise OSError(_shared_memory_message(size, error)) from error
    for part, x in zip(_cut(block, tensors), tensors, strict=True):
        part.copy_(x)
    return block, [part.map(lambda x: torch.empty_like(x, device="meta")) for part in batch]


def unpack(block: Tensor, batch: list[Slice]) -> list[Slice]:
    """The batch as views of the block, without a copy."""
    tensors = [x for part in batch for x in part.tensors()]
    parts = {id(x): part for x, part in zip(tensors, _cut(block, tensors), strict=True)}
    return [part.map(lambda x: parts[id(x)]) for part in batch]


def _cut(block: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    begin = 0
    for x in tensors:
        bytes_ = block[begin : begin + x.numel() * x.element_size()]
        yield bytes_.view(x.dtype).view(x.shape)
        begin += _padded(x)


def _padded(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


def _shared_memory_message(size: int, error: RuntimeError) -> str:
    free = ""
    if os.path.isdir(SHARED):
        status = os.statvfs(SHARED)
        free = f", {status.f_bavail * status.f_frsize / 2**20:.1f} MB are free in {SHARED}"
    return (
        f"cannot allocate {size / 2**20:.1f} MB of shared memory for a batch{free}: reduce "
        "data.workers, or set data.workers=0, which needs none; enlarge that of "
        f"a container with --shm-size or --ipc=host ({error})"
    )


def _start_server() -> None:
    """Start the fork server with the imports of workers and one thread per library."""
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


def _init_worker(_worker: int) -> None:
    """Ignore signals of launchers and terminals; exit with the parent.

    The fork server ignores SIGUSR1 and blocks SIGTERM, which waits here for `end_for_parent`.
    PyTorch watches the fork server, which waits for this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # workers always have one

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    def end_for_parent() -> None:
        """Exit on SIGTERM from the parent, which it sends when it exits."""
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    for end in (end_with_parent, end_for_parent):
        threading.Thread(target=end, daemon=True, name=end.__name__).start()


def _identity(item: Any) -> Any:
    return item
