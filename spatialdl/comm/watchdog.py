"""Watchdog: aborts the job when a rank waits too long for other ranks, after all ranks report.

A thread of each rank polls what `waiting` has recorded. The first rank that exceeds the limit
alerts the other ranks by MPI. Each rank prints its current operation and step, then one of them
names the ranks that sent no report and aborts the job. The wait cannot be cancelled: MPI cannot
undo operations that some ranks have begun. Without MPI, or with one that allows calls from a
single thread only, every rank reports and aborts by itself.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Event, Thread, main_thread
from typing import TYPE_CHECKING, Any, NamedTuple

from spatialdl.comm import check, waiting
from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.liveness import print_last, print_stderr
from spatialdl.comm.processes import Process
from spatialdl.comm.waiting import how_to_raise, module_of, place_of, setting

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

LOOK_S = 1.0
GRACE_S = 5.0
"""How long a rank that reports waits for the reports of other ranks."""
AFTERWARDS_S = 0.5
"""Delay before the abort, because launchers forward the output of ranks asynchronously."""
ENDS_S = 60.0
"""By then a watchdog has aborted the job, if it can."""
MOST = 2000
"""Maximum length of a report in characters: MPI sends short messages eagerly."""
MANY = 16


class _Running:
    watchdog: Watchdog | None = None


def start_watchdog(world: Communicator) -> None:
    """Watch this rank until it exits; collective over the world. Rank 0's limit applies.

    Without a limit nothing is watched.
    """
    limit_s = world.bcast(waiting.limit_seconds())
    if _Running.watchdog is not None:
        _Running.watchdog.limit_s = limit_s or math.inf
    elif limit_s is not None and world.size > 1:
        processes = world.allgather(Process.own())
        _Running.watchdog = Watchdog(Reports.between(world), world.rank, processes, limit_s)
        atexit.register(stop_watchdog)


def stop_watchdog() -> None:
    """Stop watching; returns when all ranks have exited."""
    if _Running.watchdog is not None:
        _Running.watchdog.stop()
        _Running.watchdog = None


def end_job_with_reports(why: str) -> None:
    """Abort because of an error on this rank, after all ranks have reported.

    Returns if no watchdog runs.
    """
    if _Running.watchdog is not None:
        _Running.watchdog.failed = why
        time.sleep(ENDS_S)


class Report(NamedTuple):
    """Report of a rank.

    Attributes:
        text: what it does.
        raised: whether this rank raised the alarm; else it responds to one.
        waits: whether it waits for other ranks.
        stopped: processes on its node that are not running, and their state in the kernel.
        calls: its last communications, see `check.last_calls`.
    """

    rank: int
    text: str
    raised: bool
    waits: bool
    stopped: Mapping[int, str]
    calls: Sequence[check.CommCall]


class Reports:
    """Reports between the watchdogs of all ranks, over a separate communicator of MPI.

    Args:
        comm: None if MPI may not be called from a second thread: then nothing is exchanged.

    Attributes:
        of: reports so far, by rank.
        reaches: whether ranks hear of each other.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self.reaches = comm, comm is not None
        self.of: dict[int, Report] = {}
        self._sent: list[Any] = []  # never waited for: a hanging rank receives nothing

    @classmethod
    def between(cls, world: Communicator) -> Reports:
        """Open the channel; collective over the world."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or mpi.COMM_WORLD.size != world.size:
            return cls(None)
        is_allowed = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        return cls(mpi.COMM_WORLD.Dup() if is_allowed else None)

    def poll(self) -> dict[int, Report]:
        """Reports received so far, by rank; does not block."""
        if self._comm is not None and not sys.modules["mpi4py.MPI"].Is_finalized():
            while self._comm.iprobe():
                report = self._comm.recv()
                self.of[report.rank] = report
        return self.of

    def send(self, report: Report) -> None:
        """Send to all ranks."""
        if self._comm is not None:
            others = (rank for rank in range(self._comm.size) if rank != report.rank)
            self._sent = [self._comm.isend(report, rank) for rank in others]
        self.of[report.rank] = report

    def wait_for_exits(self) -> None:
        """Wait until all ranks have exited, so that this one reports meanwhile."""
        if self._comm is not None and not sys.modules["mpi4py.MPI"].Is_finalized():
            all_exited, pause = self._comm.Ibarrier(), 1e-3
            while not all_exited.Test():
                time.sleep(pause)
                pause = min(2 * pause, 0.05)


class Watchdog:
    """Watchdog thread of this process.

    Args:
        reports: channel between the watchdogs of all ranks.
        rank: this rank.
        processes: processes of all ranks.
        limit_s: seconds that a wait may take.

    Attributes:
        failed: error of this rank that aborts the job; empty for none.
    """

    def __init__(
        self, reports: Reports, rank: int, processes: Sequence[Process], limit_s: float
    ) -> None:
        self._reports, self._rank = reports, rank
        self._processes, self.limit_s = processes, limit_s
        self.failed = ""
        self._look_s = min(LOOK_S, limit_s / 10)
        self._pid = os.getpid()
        self._clock, self._since = 0.0, dict[int, tuple[int, float]]()
        self._stop = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self._pid:  # a forked process that exits
            return
        waiting.noted("exit of all ranks", None, self._reports.wait_for_exits)
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self._look_s):
            now = time.monotonic()
            # suspending the whole job stops this clock too, so that resuming raises no alarm
            self._clock += min(now - before, 2 * self._look_s)
            was_away, before = now - before > self.limit_s, now
            overdue = self._overdue_thread()
            if was_away:  # launchers also wake a stopped rank in order to end it
                continue
            if overdue is not None or self.failed or self._reports.poll():
                self._abort(overdue)

    def _overdue_thread(self) -> int | None:
        """Record the waits of all threads; return a thread that exceeds the limit."""
        before = self._since
        self._since = {}
        for thread, number in waiting.numbers().items():
            known, since = before.get(thread, (0, 0.0))
            self._since[thread] = (number, since if number == known else self._clock)
        for thread, (number, since) in self._since.items():
            wait = waiting.wait_of(thread) if self._clock - since > self.limit_s else None
            if wait is not None and wait.number == number and wait.ranks:
                return thread
        return None

    def _abort(self, overdue: int | None) -> None:
        own = self._report(overdue)
        print_stderr(own.text)
        self._reports.send(own)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and len(self._answers()) < len(self._processes):
            time.sleep(0.05)
        reports = dict(self._reports.of)
        leader = min((rank for rank, one in reports.items() if one.raised), default=self._rank)
        if leader == self._rank:
            time.sleep(AFTERWARDS_S)
            print_last(self._summary(reports))
        else:
            time.sleep(2 * GRACE_S)  # the leader aborts the job, unless it is gone itself
        end_job_for_sure()

    def _answers(self) -> set[int]:
        """Ranks that have reported, and those that cannot because they are stopped."""
        reports = self._reports.poll()
        stopped = {
            rank
            for one in reports.values()
            for rank, why in one.stopped.items()
            if why.startswith("stopped")
        }
        return stopped | set(reports)

    def _report(self, overdue: int | None) -> Report:
        try:
            text, waits = (self.failed, False) if self.failed else self._state(overdue)
        except Exception as error:  # the job must abort all the same
            text, waits = f"cannot determine its current operation: {error!r}", True
        where = f"rank {self._rank} on {self._processes[self._rank].host}"
        if waiting.place():
            where += f", {waiting.place()}"
        states = {rank: one.state() for rank, one in enumerate(self._processes)}
        stopped = {rank: state for rank, state in states.items() if state is not None}
        raised = overdue is not None or bool(self.failed)
        text = f"{where}: {text}"[:MOST]
        return Report(self._rank, text, raised, waits, stopped, check.last_calls())

    def _state(self, overdue: int | None) -> tuple[str, bool]:
        """Current operation of this rank, and whether it waits for other ranks."""
        main = main_thread().ident or 0
        threads = [main, *(thread for thread in self._since if thread != main)]
        for thread in threads if overdue is None else [overdue]:
            wait = waiting.wait_of(thread)
            if wait is not None and wait.ranks:
                text = f"waits for {self._waited(thread, wait)}in {': '.join(wait.what)}"
                module = module_of(thread)
                text += f", in {module}," if module else ""
                peers = [rank for rank in wait.ranks if rank != self._rank]
                text += f" with {_ranks_text(peers)}"
                if overdue is not None:
                    text += f", longer than {setting('timeout', f'{self.limit_s:g}')}"
                return text, True
        wait = waiting.wait_of(main)
        operation = ""
        if wait is not None:
            operation = f" for {self._waited(main, wait)}it is in {': '.join(wait.what)},"
        return f"does not wait for other ranks;{operation} at {place_of(main)}", False

    def _waited(self, thread: int, wait: waiting.Wait) -> str:
        number, since = self._since.get(thread, (0, 0.0))
        return f"{self._clock - since:.0f} s " if number == wait.number else "a moment "

    def _summary(self, reports: Mapping[int, Report]) -> str:
        """The likely cause from all reports, and the remedy."""
        stopped = {rank: why for one in reports.values() for rank, why in one.stopped.items()}
        busy = sorted(rank for rank, one in reports.items() if not one.waits)
        missing = [rank for rank in range(len(self._processes)) if rank not in reports]
        if not self._reports.reaches:
            missing = sorted(stopped)
        parts = []
        for rank in missing[:MANY]:
            why = stopped.get(rank, "stopped, dead, unreachable, or in a call that holds the GIL")
            parts.append(f"no report from rank {rank} ({self._processes[rank]}), which is {why}")
        failed = any(one.raised and not one.waits for one in reports.values())
        if busy and not failed:
            parts.append(f"{_ranks_text(busy)} did not enter the communication, see above")
        mismatch = check.first_mismatch({rank: one.calls for rank, one in reports.items()})
        if mismatch:
            parts.append(f"{mismatch}; {check.how_to_switch_on()}")
        elif not parts and self._reports.reaches and not failed:
            parts.append(
                "all ranks wait for each other: look for control flow that depends on the rank, "
                f"which {setting('check', True)} detects"
            )
        why = "; ".join(parts)
        if failed:
            return f"{why or 'see above'}. Aborting the job"
        return (
            f"{why or 'some rank did not enter the communication'}. Aborting the job. "
            "If ranks have reason to wait this long (validation, storage, a first step that "
            f"compiles): raise {how_to_raise()}"
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 5 and 7 more"."""
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
