"""Run of a batch: slides planned, cut and finished in this process, in others, or on MPI ranks."""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from spatialdl.comm.launch import check_mpi_world, initialise_mpi, launched
from spatialdl.common.text import progress_bar
from spatialdl.data.outcomes import failure_reason
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import (
    BatchRequest,
    Planned,
    Task,
    cut_slide,
    finish_slide,
    plan_slide,
)

_STEPS = "spatialdl.slides.batch.steps"
_AHEAD = 2  # calls in flight for each worker, so that none is idle between calls
# slides in progress are completed before others are planned
_FINISH, _CUT, _PLAN = range(3)


class SerialExecutor:
    """Executes calls one by one in this process.

    Attributes:
        room: largest number of calls in flight.
    """

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
        """Restart after a process died; all calls in flight are lost."""


class ProcessExecutor(SerialExecutor):
    """Executes calls in worker processes of this machine; arguments and results are pickled.

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
        """Schedule the call on the next idle process; its future may raise `BrokenProcessPool`."""
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


class RankExecutor(SerialExecutor):
    """Executes calls on all MPI ranks but rank 0, which schedules them.

    Args:
        executor: an `MPICommExecutor` pool of mpi4py.
    """

    def __init__(self, executor: Any) -> None:
        self.room = _AHEAD * executor.num_workers
        self.submit = executor.submit  # type: ignore[method-assign]

    def renew(self) -> None:
        """Raise: MPI aborts all ranks when one dies."""
        raise BrokenProcessPool("a rank died")


@contextmanager
def batch_executor(jobs: int, executor: Executor | None) -> Iterator[SerialExecutor]:
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


class Call(NamedTuple):
    """A call that a job waits for.

    Attributes:
        urgency: the smallest value is scheduled first.
        run: executed by an executor.
        done: called in this process when it has ended.
    """

    urgency: tuple[int, ...]
    run: Callable[[], Any]
    done: Callable[[], object] = lambda: None


Job = Generator[Sequence[Call], list[Any], None]
"""Yields calls and receives their results, or the exception of the first one that failed."""


@dataclass
class _Step:
    """The calls that a job waits for, and what they gave so far."""

    job: Job
    calls: Sequence[Call]
    results: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None

    def finish(self, number: int, future: Future[Any]) -> Callable[[], Sequence[Call]] | None:
        """Note the result of a call; return what resumes the job after the last one."""
        error = future.exception()
        self.results[number] = None if error else future.result()
        self.error = self.error or error
        self.calls[number].done()
        if len(self.results) < len(self.calls):
            return None
        results = [self.results[number] for number in range(len(self.calls))]
        if self.error is not None:
            return partial(self.job.throw, self.error)
        return partial(self.job.send, results)


_Work = tuple[tuple[int, ...], int, int, _Step]
"""Urgency, order among equals, and a call by its number in a step."""


def share(executor: SerialExecutor, jobs: Iterable[Job]) -> None:
    """Execute the calls of all jobs.

    If a process dies, each call that was in flight is repeated with no other call in flight. The
    call that kills its process again fails with `BrokenExecutor`.
    """
    waiting: list[_Work] = []
    order = count()

    def resume(job: Job, advance: Callable[[], Sequence[Call]]) -> None:
        with suppress(StopIteration):
            while not (calls := advance()):
                advance = partial(job.send, [])
            step = _Step(job, calls)
            for number, call in enumerate(calls):
                heapq.heappush(waiting, (call.urgency, next(order), number, step))

    def submitted(work: _Work) -> Future[Any]:
        *_, number, step = work
        try:
            return executor.submit(step.calls[number].run)
        except BrokenExecutor:  # a process died between two calls
            executor.renew()
            return executor.submit(step.calls[number].run)

    for job in jobs:
        resume(job, partial(next, job))
    running: dict[Future[Any], _Work] = {}
    suspects: list[_Work] = []
    tried = False  # a suspect is in flight, and no other call
    while waiting or running or suspects:
        if suspects and not running:
            work, tried = suspects.pop(), True
            running[submitted(work)] = work
        while waiting and not (suspects or tried) and len(running) < executor.room:
            work = heapq.heappop(waiting)
            running[submitted(work)] = work
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        broken = False
        for future in done:
            work = running.pop(future)
            died = isinstance(future.exception(), BrokenExecutor)
            broken |= died
            if died and not tried:
                suspects.append(work)
                continue
            *_, number, step = work
            if advance := step.finish(number, future):
                resume(step.job, advance)
        if broken:
            suspects.extend(running.values())
            running.clear()
            executor.renew()
        tried = tried and bool(running)


class BatchRun:
    """One run of a batch.

    Args:
        batch: parameters.
        tasks: the slides.
        dry: plan only.

    Attributes:
        reports: of the slides so far, by name.
        before: names of slides done by an earlier run.
        finished: names of slides cut by this run.
        bytes: of a dry run: bytes that would be written, before compression.
    """

    def __init__(self, batch: BatchRequest, tasks: Sequence[Task], *, dry: bool) -> None:
        self._batch = batch
        self._dry = dry
        # largest first: with a large slide at the end all processes but one would be idle
        self._tasks = sorted(tasks, key=lambda task: (-task.bytes, task.name))
        self.reports: dict[str, TilingReport] = {}
        self.before: list[str] = []
        self.finished: list[str] = []
        self.bytes = 0
        unit = "strip" if batch.options.whole else "tile"
        self._bar = progress_bar(None, None, unit, total=0)

    def go(self, executor: SerialExecutor) -> None:
        """Run the batch on an executor."""
        with self._bar:
            share(executor, [self._slide(*one) for one in enumerate(self._tasks)])

    def _slide(self, order: int, task: Task) -> Job:
        """Plan, cut and finish a slide; an error is its report."""
        batch, report = self._batch, None
        try:
            planned: Planned | TilingReport
            [planned] = yield [Call((_PLAN, order), partial(plan_slide, batch, task))]
            report = planned if isinstance(planned, TilingReport) else planned.report
            if isinstance(planned, TilingReport):
                self.before.append(task.name)
            elif self._dry:
                report.written = 1 if planned.region else planned.pieces
                self.bytes += planned.bytes
            else:
                outline = planned.outline()
                self._bar.total += planned.pieces  # so far: later slides are not planned yet
                parts = yield [
                    Call(
                        (_CUT, order, number),
                        partial(cut_slide, batch, task, outline, number, part),
                        partial(self._advance, part.count),
                    )
                    for number, part in enumerate(planned.parts)
                ]
                report = None  # has counts of tiles that are not kept if finishing fails
                finish = partial(finish_slide, batch, task, outline, parts)
                [report] = yield [Call((_FINISH, order), finish)]
                self.finished.append(task.name)
        except Exception as error:
            report = report or TilingReport(task.name, file=str(task.path))
            report.failed, report.note = True, failure_reason(f"slide {task.path}", error)
        assert report is not None
        self.reports[task.name] = report

    def _advance(self, pieces: int) -> None:
        self._bar.set_postfix_str(f"{len(self.reports)}/{len(self._tasks)} slides", refresh=False)
        self._bar.update(pieces)
