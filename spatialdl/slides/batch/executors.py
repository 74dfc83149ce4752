"""Executors of a batch: this process, worker processes of this machine, or MPI ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from spatialdl.comm.launch import check_mpi_world, initialise_mpi, launched

_STEPS = "spatialdl.slides.batch.steps"
_AHEAD = 2  # calls in flight for each worker, so that none is idle between calls
_COUNT: ContextVar[Callable[[int], None]] = ContextVar("count", default=lambda tiles: None)


def count_tiles(tiles: int) -> None:
    """Add processed tiles to the executor's count; call it in the process that does the work."""
    _COUNT.get()(tiles)


class BatchExecutor(Protocol):
    """Executes calls in any order; arguments and results are pickled.

    At most `room` calls may be in flight.
    """

    room: int

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule a call. Its future may raise `BrokenProcessPool`."""

    def counted(self) -> int:
        """Return the tiles processed so far, unfinished calls included; 0 if unknown."""

    def renew(self) -> None:
        """Restart after a process died; all calls in flight are lost."""


class SerialExecutor:
    """Executes calls one by one in this process.

    Args:
        watch: called with the number of tiles processed so far.
    """

    room = 1

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._tiles = 0
        self._watch = watch

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Execute the call at once."""
        before = _COUNT.set(self._count)
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        finally:
            _COUNT.reset(before)
        return future

    def counted(self) -> int:
        """Return the tiles processed so far."""
        return self._tiles

    def renew(self) -> None:
        """Do nothing: there is no other process that could die."""

    def _count(self, tiles: int) -> None:
        self._tiles += tiles
        self._watch(self._tiles)


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
        self._tiles = self._context.Value("q", 0)
        self._pool = self._start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule the call on the next idle process."""
        return self._pool.submit(call)

    def counted(self) -> int:
        """Return the tiles processed so far."""
        return int(self._tiles.value)

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
        return ProcessPoolExecutor(
            self._count, mp_context=self._context, initializer=_in_worker, initargs=(self._tiles,)
        )


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

    def counted(self) -> int:
        """Return 0: counts of other ranks are not known."""
        return 0

    def renew(self) -> None:
        """Raise: MPI aborts all ranks when one dies."""
        raise BrokenProcessPool("a rank died")


@contextmanager
def batch_executor(
    jobs: int, executor: Executor | None, watch: Callable[[int], None]
) -> Iterator[BatchExecutor]:
    """Create the executor of a batch, and stop its processes on exit.

    Args:
        jobs: worker processes on this machine; 1 executes calls in this process.
        executor: pool of the MPI ranks, if there are several; `jobs` is then ignored.
        watch: called with the tiles so far, if this process itself executes the calls.
    """
    if executor is not None:
        yield RankExecutor(executor)
    elif jobs == 1:
        yield SerialExecutor(watch)
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


def _in_worker(count: Any) -> None:
    # the scheduling process ends its workers by SIGTERM, which the fork server blocks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def add(tiles: int) -> None:
        with count.get_lock():
            count.value += tiles

    _COUNT.set(add)


def _end_with_parent() -> None:
    """Exit with the parent: if that is killed, a worker would wait for calls forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
