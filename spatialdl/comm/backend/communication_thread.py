"""A thread that runs the collectives of one group in the order in which they were started.

MPI's nonblocking collectives make little progress outside of MPI calls, so collectives that overlap
with computation run as blocking ones in a thread. Each group has one: with a single thread for all
groups, two ranks that use their groups in different orders would deadlock.

A synchronous call with an empty queue runs in the calling thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread, get_ident

import torch
from torch import Tensor

from spatialdl.comm.backend.calls import Call, Job, fail
from spatialdl.torch_internals import Work


class CollectiveWork(Work):
    """A pending collective.

    Args:
        tensors: result of its future.
    """

    def __init__(self, call: Call, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.call, self._tensors = call, list(tensors)
        devices: list[int | str | torch.device] = list({t.device for t in tensors if not t.is_cpu})
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._done = Event()

    def finish(self) -> None:
        """Mark as complete; runs callbacks chained to the future."""
        self._done.set()
        self._future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors are complete.

        Raises:
            RuntimeError: after a timeout greater than zero.
        """
        limit = timeout.total_seconds() if timeout is not None else 0.0
        if not self._done.wait(limit if limit > 0 else None):
            raise RuntimeError(f"{self.call} in {self.call.group} took longer than {limit:g} s")
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set()  # failures abort the job

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class FinishedWork(Work):
    """A collective that ran in the calling thread."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


FINISHED = FinishedWork()


class CommunicationThread:
    """Runs the collectives of a group in order, in the calling thread or in a separate one.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, Lock()
        self._unfinished = 0
        self._queue: SimpleQueue[tuple[Job, CollectiveWork] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, call: Call, job: Job) -> Work:
        """Run a collective now, after everything that was started before."""
        if self._inside():
            call.run(job)
            return FINISHED
        with self._lock:
            if self._unfinished == 0:
                call.run(job)
                return FINISHED
        work = self.start(call, job, ())
        work.wait()
        return work

    def start(self, call: Call, job: Job, tensors: Sequence[Tensor]) -> CollectiveWork:
        """Start a collective in the thread, which also runs callbacks of its future.

        A collective started by a callback runs at once: on a rank where the callback was chained
        later, it follows its collective directly too.
        """
        work = CollectiveWork(call, tensors)
        if self._inside():
            call.run(job)
            work.finish()
        else:
            with self._lock:
                self._unfinished += 1
                if self._thread is None:
                    self._thread = Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self._queue.put((job, work))
        return work

    def close(self) -> None:
        """Block until everything that was started is complete, and the thread has ended."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _inside(self) -> bool:
        return self._thread is not None and self._thread.ident == get_ident()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            job, work = item
            try:
                work.call.run(job)
            except BaseException as error:  # no thread may be waiting, and other ranks would hang
                fail(work.call, f"failed: {error}")
            with contextlib.suppress(Exception):  # errors of callbacks are stored in their futures
                work.finish()
            del item, job, work  # or the last tensors would be kept until the next call
            with self._lock:
                self._unfinished -= 1
