"""Who does the work of a batch: this process, processes of this machine, or the ranks of MPI."""

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
_AHEAD = 2  # calls handed out for each worker, so that none waits for the next
_TELL: ContextVar[Callable[[int], None]] = ContextVar("tell", default=lambda tiles: None)


def count_tiles(tiles: int) -> None:
    """Count tiles that were looked at, for whoever watches; called where the work is done."""
    _TELL.get()(tiles)


class BatchExecutor(Protocol):
    """Does calls, in whatever order; arguments and results are pickled.

    `room` calls may be under way at a time.
    """

    room: int

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have a call done. Its future may raise `BrokenProcessPool`."""

    def told(self) -> int:
        """Tiles that were told so far, where that is known before a call is over; else 0."""

    def renew(self) -> None:
        """Go on after a process died: all calls under way are lost."""


class SerialExecutor:
    """This process, call by call.

    Args:
        watch: called with the tiles told so far.
    """

    room = 1

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._tiles = 0
        self._watch = watch

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Do it now."""
        before = _TELL.set(self._count)
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        finally:
            _TELL.reset(before)
        return future

    def told(self) -> int:
        """Tiles so far."""
        return self._tiles

    def renew(self) -> None:
        """Nothing dies here without all of it."""

    def _count(self, tiles: int) -> None:
        self._tiles += tiles
        self._watch(self._tiles)


class ProcessExecutor:
    """Processes of this machine.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.room = _AHEAD * count
        self._count = count
        # not forked: MPI, HDF5 or threads may have been at work in this one
        self._context = multiprocessing.get_context("forkserver")
        # imported once, not by every process
        self._context.set_forkserver_preload(["spatialdl.data.fork_server", _STEPS])
        self._told = self._context.Value("q", 0)
        self._pool = self._start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have it done by the next process that is free."""
        return self._pool.submit(call)

    def told(self) -> int:
        """Tiles so far."""
        return int(self._told.value)

    def renew(self) -> None:
        """Start other processes."""
        self.stop()
        self._pool = self._start()

    def stop(self) -> None:
        """End the processes, whatever they are at."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._count, mp_context=self._context, initializer=_in_worker, initargs=(self._told,)
        )


class RankExecutor:
    """The ranks of MPI other than the first, which hands out the work.

    Args:
        executor: of mpi4py.
    """

    def __init__(self, executor: Any) -> None:
        self.room = _AHEAD * executor.num_workers
        self._executor = executor

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have it done by the next rank that is free."""
        future: Future[Any] = self._executor.submit(call)
        return future

    def told(self) -> int:
        """Not known."""
        return 0

    def renew(self) -> None:
        """MPI ends all ranks when one dies."""
        raise BrokenProcessPool("a rank died")


@contextmanager
def batch_executor(
    jobs: int, executor: Executor | None, watch: Callable[[int], None]
) -> Iterator[BatchExecutor]:
    """Those who do the work.

    Args:
        jobs: processes on this machine; 1 is this process itself.
        executor: of the ranks of MPI, where there are some; `jobs` does not count then.
        watch: called with the tiles so far where this process itself looks at them.
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
    """Whether this process hands out work, and the executor by which other ranks do it.

    Under mpiexec or srun with several ranks, rank 0 hands out, and all others do what it says
    until its block ends; only then do they enter theirs.

    Raises:
        ValueError: ranks were started together, and MPI does not see them.
    """
    world = launched()
    if world is None or world.size == 1 or world.launcher == "torchrun":
        yield True, None
        return
    initialise_mpi()
    from mpi4py import MPI  # starts MPI, which one process alone can do without
    from mpi4py.futures import MPICommExecutor

    check_mpi_world(MPI.COMM_WORLD.size)
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield executor is not None, executor


def _in_worker(told: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that hands out ends the others
    # by SIGTERM, which the fork server blocks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def add(tiles: int) -> None:
        with told.get_lock():
            told.value += tiles

    _TELL.set(add)


def _end_with_parent() -> None:
    """Or a process whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
