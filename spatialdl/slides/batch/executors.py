"""Executors of a batch: this process, worker processes of this machine, or MPI ranks."""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from spatialdl.comm.launch import check_mpi_world, initialise_mpi, launched

DIED = "the process that worked on it died (killed, perhaps out of memory)"
_STEPS = "spatialdl.slides.batch.steps"
_AHEAD = 2  # calls in flight for each worker, so that none is idle between calls


class BatchExecutor(Protocol):
    """Executes calls in any order; arguments and results are pickled.

    At most `room` calls may be in flight.
    """

    room: int

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule a call. Its future may raise `BrokenProcessPool`."""

    def renew(self) -> None:
        """Restart after a process died; all calls in flight are lost."""


class SerialExecutor:
    """Executes calls one by one in this process."""

    room = 1

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Execute the call at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future

    def renew(self) -> None:
        """Do nothing: there is no other process that could die."""


class ProcessExecutor:
    """Executes calls in worker processes of this machine.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self.room = _AHEAD * count
        self._count = count
        # fork is not safe: this process may use MPI, HDF5 or threads
        self._context = multiprocessing.get_context("forkserver")
        # imported once, not by every process
        self._context.set_forkserver_preload(["spatialdl.data.fork_server", _STEPS])
        self._pool = self._start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule the call on the next idle process."""
        return self._pool.submit(call)

    def renew(self) -> None:
        """Replace the processes by new ones."""
        self.stop()
        self._pool = self._start()

    def stop(self) -> None:
        """Terminate the processes, also in the middle of a call."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, mp_context=self._context, initializer=_in_worker)


class RankExecutor:
    """Executes calls on all MPI ranks but rank 0, which schedules them.

    Args:
        executor: an `MPICommExecutor` pool of mpi4py.
    """

    def __init__(self, executor: Any) -> None:
        self.room = _AHEAD * executor.num_workers
        self._executor = executor

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule the call on the next idle rank."""
        future: Future[Any] = self._executor.submit(call)
        return future

    def renew(self) -> None:
        """Raise: MPI aborts all ranks when one dies."""
        raise BrokenProcessPool("a rank died")


@contextmanager
def batch_executor(jobs: int, executor: Executor | None) -> Iterator[BatchExecutor]:
    """Create the executor of a batch, and stop its processes on exit.

    Args:
        jobs: worker processes on this machine; 1 executes calls in this process.
        executor: pool of the MPI ranks, if there are several; `jobs` is then ignored.
    """
    if executor is not None:
        yield RankExecutor(executor)
    elif jobs == 1:
        yield SerialExecutor()
    else:
        processes = ProcessExecutor(jobs)
        try:
            yield processes
        finally:
            processes.stop()


@contextmanager
def executor_of_ranks() -> Iterator[tuple[bool, Any]]:
    """Yield whether this process schedules work, and the pool of the other ranks.

    Under mpiexec or srun with several ranks, rank 0 schedules. All other ranks execute its calls
    until its block ends; only then do they enter theirs.

    Raises:
        ValueError: several ranks were launched, and the MPI world has another size.
    """
    world = launched()
    if world is None or world.size == 1 or world.launcher == "torchrun":
        yield True, None
        return
    initialise_mpi()
    from mpi4py import MPI  # initialises MPI, which a single process does not need
    from mpi4py.futures import MPICommExecutor

    check_mpi_world(MPI.COMM_WORLD.size)
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield executor is not None, executor


def _in_worker() -> None:
    # the scheduling process ends its workers by SIGTERM, which the fork server blocks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit with the parent: if that is killed, a worker would wait for calls forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(order=True)
class Work:
    """A call and its continuation.

    Attributes:
        urgency: the smallest value is scheduled first.
        call: runs on the executor.
        then: takes the result of the call, or its exception, and returns more work.
    """

    urgency: tuple[int, ...]
    call: Callable[[], Any] = field(compare=False)
    then: Callable[[Any], Iterable[Work]] = field(compare=False)


def share(executor: BatchExecutor, works: Iterable[Work]) -> None:
    """Execute all work, and the work that its results add.

    If a process dies, each call that was in flight is repeated with no other call in flight. The
    call that kills its process again has `BrokenExecutor` as its result.
    """
    waiting = list(works)
    heapq.heapify(waiting)
    running: dict[Future[Any], Work] = {}
    suspects: list[Work] = []
    tried = False  # a suspect is in flight, and no other call
    while waiting or running or suspects:
        if suspects and not running:
            suspect, tried = suspects.pop(), True
            running[_submitted(executor, suspect)] = suspect
        while waiting and not (suspects or tried) and len(running) < executor.room:
            work = heapq.heappop(waiting)
            running[_submitted(executor, work)] = work
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        broken = False
        for future in done:
            work = running.pop(future)
            error = future.exception()
            if isinstance(error, BrokenExecutor):
                broken = True
                if not tried:
                    suspects.append(work)
                    continue
            for more in work.then(future.result() if error is None else error):
                heapq.heappush(waiting, more)
        if broken:
            suspects.extend(running.values())
            running.clear()
            executor.renew()
        tried = tried and bool(running)


def _submitted(executor: BatchExecutor, work: Work) -> Future[Any]:
    try:
        return executor.submit(work.call)
    except BrokenExecutor:  # a process died between two calls
        executor.renew()
        return executor.submit(work.call)
