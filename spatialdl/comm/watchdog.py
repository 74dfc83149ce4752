"""Watchdog: aborts the job when a rank waits too long for other ranks, after all ranks report.

A thread of each rank polls what `waiting` has recorded. The first rank that exceeds the limit
alerts the other ranks. Each rank prints its current operation and step, then one of them names the
ranks that sent no report and aborts the job. The wait cannot be cancelled: MPI cannot undo
operations that some ranks have begun.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Sequence
from threading import Event, Thread, main_thread
from typing import NamedTuple

from spatialdl.comm import check, limit, waiting
from spatialdl.comm.alarm import MOST, Alarm, AlarmReport, Unheard, alarm_between
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.liveness import print_last, print_stderr
from spatialdl.comm.processes import Process
from spatialdl.comm.waiting import module_of, place_of

LOOK_S = 1.0
GRACE_S = 5.0
"""How long the rank that raised the alarm waits for reports."""
AFTERWARDS_S = 0.5
"""Delay before the abort, because launchers forward the output of ranks asynchronously."""
ENDS_S = 60.0
"""By then a watchdog has aborted the job, if it can."""
ASK_S = 5.0
"""After this long a rank queries its peers for whether they have exited."""
MANY = 16
_ONE_SIDED = ("broadcast", "gather")
"""Some ranks may finish their part of these, and exit, while other ranks wait."""
_UNKNOWN = "stopped, dead, unreachable, or in a call that holds the GIL"


class _Running:
    watchdog: Watchdog | None = None


def start_watchdog(world: Communicator) -> None:
    """Watch this rank until it exits; collective over the world. Rank 0's limit applies.

    Without a limit nothing is watched; if the user asked for no limit, only ranks that exit while
    other ranks wait for them are detected.
    """
    limit_s, is_set = world.bcast((limit.seconds() or math.inf, limit.is_set()))
    if _Running.watchdog is not None:
        _Running.watchdog.limit_s = limit_s
        return
    if not is_set or world.size == 1:
        return
    _watch_all(world, limit_s)


def watch_calls(rank: int, world: Communicator | None) -> None:
    """Watch calls with a timeout where no watchdog runs; collective over `world`.

    Args:
        rank: this rank of the world.
        world: None if only some ranks call it: then each aborts independently.
    """
    if _Running.watchdog is not None:
        return
    if world is not None and world.size > 1:
        _watch_all(world, math.inf)
    elif world is None:
        _Running.watchdog = Watchdog(Unheard(), rank, [Process.own()] * (rank + 1), math.inf)


def _watch_all(world: Communicator, limit_s: float) -> None:
    processes = world.allgather(Process.own())
    _Running.watchdog = Watchdog(alarm_between(world), world.rank, processes, limit_s)
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


class _Overdue(NamedTuple):
    """Why this rank aborts the job.

    Attributes:
        thread: the waiting thread.
        why: which limit it exceeded.
        remedy: the setting that raises the limit.
    """

    thread: int
    why: str
    remedy: str = ""


class Watchdog:
    """Watchdog thread of this process.

    Args:
        alarm: channel between the watchdogs of all ranks.
        rank: this rank.
        processes: processes of all ranks.
        limit_s: seconds that a wait may take; may be infinite.

    Attributes:
        failed: error of this rank that aborts the job; empty for none.
    """

    def __init__(self, alarm: Alarm, rank: int, processes: list[Process], limit_s: float) -> None:
        self._alarm, self._rank = alarm, rank
        self._processes, self.limit_s = processes, limit_s
        self.failed = ""
        self._look_s = min(LOOK_S, limit_s / 10)
        self._queried: dict[int, int] = {}  # by thread the wait whose peers were queried
        self._pid = os.getpid()
        self._clock, self._since = 0.0, dict[int, tuple[int, float]]()
        self._stop = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self._pid:  # a forked process that exits
            return
        waiting.noted("exit of all ranks", None, self._alarm.serve_until_all_exit)
        self._stop.set()
        self._thread.join()
        self._alarm.close()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self._look_s):
            now = time.monotonic()
            # suspending the whole job stops this clock too, so that resuming raises no alarm
            self._clock += min(now - before, 2 * self._look_s)
            was_away, before = now - before > self.limit_s, now
            overdue = self._look()
            if was_away:  # launchers also wake a stopped rank in order to end it
                continue
            alarm = any(report.raised for report in self._alarm.received().values())
            if overdue is not None or self.failed or alarm:
                self._abort(overdue)

    def _look(self) -> _Overdue | None:
        """Record the waits of all threads; return one that is overdue."""
        before = self._since
        self._since = {}
        for thread, number in waiting.numbers().items():
            known, since = before.get(thread, (0, 0.0))
            self._since[thread] = (number, since if number == known else self._clock)
        for thread, (number, since) in self._since.items():
            seconds = self._clock - since
            wait = waiting.wait_of(thread) if seconds > 0 else None
            if wait is None or wait.number != number or not wait.ranks:
                continue
            if seconds > self.limit_s:
                limit_s = limit.setting("timeout", f"{self.limit_s:g}")
                return _Overdue(thread, f"longer than {limit_s}", limit.how_to_raise())
            if seconds > wait.limit_s:
                of_group = "the timeout of init_process_group or new_group"
                return _Overdue(thread, f"longer than the timeout of {wait.limit_s:g} s", of_group)
            if seconds <= ASK_S:
                continue
            if self._queried.get(thread) != number:
                self._queried[thread] = number
                self._alarm.query_exit([rank for rank in wait.ranks if rank != self._rank][:MANY])
            exited = sorted(self._alarm.exited() & set(wait.ranks))
            if exited and wait.what[-1] not in _ONE_SIDED:
                has = "has" if len(exited) == 1 else "have"
                return _Overdue(thread, f"but {_ranks_text(exited)} {has} exited")
        return None

    def _abort(self, overdue: _Overdue | None) -> None:
        own = self._report(overdue)
        print_stderr(own.text)
        self._alarm.send(own)
        reports = self._collect(own)
        leader = min((rank for rank, one in reports.items() if one.raised), default=self._rank)
        if leader == self._rank:
            time.sleep(AFTERWARDS_S)
            print_last(self._summary(reports, overdue.remedy if overdue else ""))
        else:
            time.sleep(2 * GRACE_S)  # the leader aborts the job, unless it is gone itself
        end_job_for_sure()

    def _collect(self, own: AlarmReport) -> dict[int, AlarmReport]:
        """Reports that arrive within the grace period, this rank's included."""
        until = time.monotonic() + GRACE_S
        while True:
            reports = {**self._alarm.received(), self._rank: own}
            stopped = {
                int(rank)
                for one in reports.values()
                for rank, why in one.stopped.items()
                if why.startswith("stopped")
            }
            if len(reports.keys() | stopped) == len(self._processes) or time.monotonic() > until:
                return reports
            time.sleep(0.05)

    def _report(self, overdue: _Overdue | None) -> AlarmReport:
        try:
            text, waits = (self.failed, False) if self.failed else self._state(overdue)
        except Exception as error:  # the job must abort all the same
            text, waits = f"cannot determine its current operation: {error!r}", True
        where = f"rank {self._rank} on {self._processes[self._rank].host}"
        if waiting.place():
            where += f", {waiting.place()}"
        states = {str(rank): one.state() for rank, one in enumerate(self._processes)}
        stopped = {rank: state for rank, state in states.items() if state is not None}
        raised = overdue is not None or bool(self.failed)
        text = f"{where}: {text}"[:MOST]
        return AlarmReport(self._rank, text, raised, waits, stopped, tuple(check.last_calls()))

    def _state(self, overdue: _Overdue | None) -> tuple[str, bool]:
        """Current operation of this rank, and whether it waits for other ranks."""
        main = main_thread().ident or 0
        background = [thread for thread in self._since if thread != main]
        for thread in (main, *background) if overdue is None else (overdue.thread,):
            wait = waiting.wait_of(thread)
            if wait is not None and wait.ranks:
                text = f"waits for {self._waited(thread, wait)}in {': '.join(wait.what)}"
                module = module_of(thread)
                text += f", in {module}," if module else ""
                peers = [rank for rank in wait.ranks if rank != self._rank]
                text += f" with {_ranks_text(peers)}"
                if overdue is not None:
                    text += f", {overdue.why}"
                return text, True
        wait = waiting.wait_of(main)
        operation = ""
        if wait is not None:
            operation = f" for {self._waited(main, wait)}it is in {': '.join(wait.what)},"
        return f"does not wait for other ranks;{operation} at {place_of(main)}", False

    def _waited(self, thread: int, wait: waiting.Wait) -> str:
        number, since = self._since.get(thread, (0, 0.0))
        return f"{self._clock - since:.0f} s " if number == wait.number else "a moment "

    def _summary(self, reports: dict[int, AlarmReport], remedy: str) -> str:
        """The likely cause from all reports, and the remedy."""
        stopped = {int(r): why for one in reports.values() for r, why in one.stopped.items()}
        missing = [r for r in range(len(self._processes)) if r not in reports]
        exited = sorted(self._alarm.exited())
        busy = sorted(rank for rank, one in reports.items() if not one.waits and rank not in exited)
        parts = []
        if not self._alarm.reaches:
            missing = sorted(stopped)
        for rank in missing[:8]:
            why = f"which is {stopped[rank]}" if rank in stopped else _UNKNOWN
            parts.append(f"no report from rank {rank} ({self._processes[rank]}), {why}")
        if len(missing) > 8:
            parts.append(f"nor from {len(missing) - 8} more ranks")
        failed = any(one.raised and not one.waits for one in reports.values())
        if busy and not failed:
            parts.append(f"{_ranks_text(busy)} did not enter the communication, see above")
        if exited:
            parts.append(
                f"{_ranks_text(exited)} exited while other ranks waited: by sys.exit, or after "
                "fewer steps"
            )
        mismatch = check.first_mismatch({rank: one.calls for rank, one in reports.items()})
        if mismatch:
            parts.append(f"{mismatch}; {check.how_to_switch_on()}")
        elif not parts and not failed and self._alarm.reaches:
            parts.append(
                "all ranks wait for each other: look for control flow that depends on the rank, "
                f"which {limit.setting('check', True)} detects"
            )
        if failed or exited:
            return f"{'; '.join(parts) or 'see above'}. Aborting the job"
        return (
            f"{'; '.join(parts) or 'some rank did not enter the communication'}. Aborting the job. "
            "If ranks have reason to wait this long (validation, storage, a first step that "
            f"compiles): raise {remedy or limit.how_to_raise()}"
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 5 and 7 more"."""
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
