"""Ends the job when a rank waits too long for others, after all have said what they wait for.

A thread of each rank looks now and then at what `waiting` has noted. The first rank that has waited
longer than the limit tells the others; each prints what it is doing, and with which step. Then one
of them says of whom nothing was heard, and ends the job. There is no way back: MPI cannot take back
what some ranks have begun.
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
from spatialdl.comm.liveness import say, say_last
from spatialdl.comm.processes import Process
from spatialdl.comm.waiting import module_of, place_of

LOOK_S = 1.0
GRACE_S = 5.0
"""How long the rank that raised the alarm waits for what the others say."""
AFTERWARDS_S = 0.5
"""Before the job ends: launchers pass on what ranks have printed in their own time."""
ENDS_S = 60.0
"""By then a watchdog has ended the job, if it can."""
ASK_S = 5.0
"""After so long a rank asks those that it waits for whether they have ended their program."""
MANY = 16
_ONE_SIDED = ("broadcast", "gather")
"""Of these some ranks have done their part, and may end, while others wait."""
_UNKNOWN = "stopped, dead, cut off, or in a call that lets no other thread run"


class _Running:
    watchdog: Watchdog | None = None


def start_watchdog(world: Communicator) -> None:
    """Watch this rank until it ends; all of the world must call it. Rank 0's limit counts.

    Without a limit nothing is watched, or, if that was asked for, only whether ranks end their
    program while others wait for them.
    """
    limit_s, is_set = world.bcast((limit.seconds() or math.inf, limit.is_set()))
    if _Running.watchdog is not None:
        _Running.watchdog.limit_s = limit_s
        return
    if not is_set or world.size == 1:
        return
    _watch_all(world, limit_s)


def watch_calls(rank: int, world: Communicator | None) -> None:
    """Watch what has a timeout of its own, where nothing else is watched; all of the world call it.

    Args:
        rank: this one, of the world.
        world: None if only some ranks call it: then each ends the job by itself.
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
    """Watch no more; returns when all ranks have ended."""
    if _Running.watchdog is not None:
        _Running.watchdog.stop()
        _Running.watchdog = None


def end_job_with_reports(why: str) -> None:
    """End the job because of an error on this rank, after all ranks have said what they do.

    Returns if no ranks can be asked.
    """
    if _Running.watchdog is not None:
        _Running.watchdog.failed = why
        time.sleep(ENDS_S)


class _Overdue(NamedTuple):
    """Why this rank ends the job.

    Attributes:
        thread: that waits.
        why: what is wrong with it.
        remedy: how to let it wait longer.
    """

    thread: int
    why: str
    remedy: str = ""


class Watchdog:
    """Of this process.

    Args:
        alarm: of all ranks.
        rank: this one.
        processes: of all ranks.
        limit_s: seconds that a wait may take; may be infinite.

    Attributes:
        failed: an error of this rank that is to end the job.
    """

    def __init__(self, alarm: Alarm, rank: int, processes: list[Process], limit_s: float) -> None:
        self._alarm, self._rank = alarm, rank
        self._processes, self.limit_s = processes, limit_s
        self.failed = ""
        self._look_s = min(LOOK_S, limit_s / 10)
        self._asked: dict[int, int] = {}  # by thread the wait for which others were asked
        self._pid = os.getpid()
        self._clock, self._since = 0.0, dict[int, tuple[int, float]]()
        self._stop = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self._pid:  # a fork that ends
            return
        waiting.noted("the end of its program", None, self._alarm.leave)
        self._stop.set()
        self._thread.join()
        self._alarm.close()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self._look_s):
            now = time.monotonic()
            # a job that was suspended as a whole goes on: its ranks have not waited meanwhile
            self._clock += min(now - before, 2 * self._look_s)
            was_away, before = now - before > self.limit_s, now
            overdue = self._look()
            if was_away:  # and launchers wake up a rank that was stopped, to end it
                continue
            alarm = any(one.raised for one in self._alarm.heard().values())
            if overdue is not None or self.failed or alarm:
                self._end(overdue)

    def _look(self) -> _Overdue | None:
        """Take note of what threads are in; one that waits for others for too long."""
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
            if self._asked.get(thread) != number:
                self._asked[thread] = number
                self._alarm.ask([rank for rank in wait.ranks if rank != self._rank][:MANY])
            ended = sorted(self._alarm.ended() & set(wait.ranks))
            if ended and wait.what[-1] not in _ONE_SIDED:
                has = "has" if len(ended) == 1 else "have"
                return _Overdue(thread, f"but {_ranks_text(ended)} {has} ended the program")
        return None

    def _end(self, overdue: _Overdue | None) -> None:
        own = self._report(overdue)
        say(own.text)
        self._alarm.tell(own)
        reports = self._gathered(own)
        leader = min((rank for rank, one in reports.items() if one.raised), default=self._rank)
        if leader == self._rank:
            time.sleep(AFTERWARDS_S)
            say_last(self._summary(reports, overdue.remedy if overdue else ""))
        else:
            time.sleep(2 * GRACE_S)  # it ends the job, unless it is gone itself
        end_job_for_sure()

    def _gathered(self, own: AlarmReport) -> dict[int, AlarmReport]:
        """What ranks say within the grace, this one too."""
        until = time.monotonic() + GRACE_S
        while True:
            reports = {**self._alarm.heard(), self._rank: own}
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
        except Exception as error:  # the job must end all the same
            text, waits = f"cannot tell what it does: {error!r}", True
        where = f"rank {self._rank} on {self._processes[self._rank].host}"
        if waiting.place():
            where += f", {waiting.place()}"
        states = {str(rank): one.state() for rank, one in enumerate(self._processes)}
        stopped = {rank: state for rank, state in states.items() if state is not None}
        raised = overdue is not None or bool(self.failed)
        text = f"{where}: {text}"[:MOST]
        return AlarmReport(self._rank, text, raised, waits, stopped, tuple(check.done_last()))

    def _state(self, overdue: _Overdue | None) -> tuple[str, bool]:
        """What this rank does, and whether it waits for others."""
        main = main_thread().ident or 0
        others = [thread for thread in self._since if thread != main]
        for thread in (main, *others) if overdue is None else (overdue.thread,):
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
        doing = ""
        if wait is not None:
            doing = f" for {self._waited(main, wait)}it is in {': '.join(wait.what)},"
        return f"does not wait for other ranks;{doing} at {place_of(main)}", False

    def _waited(self, thread: int, wait: waiting.Wait) -> str:
        number, since = self._since.get(thread, (0, 0.0))
        return f"{self._clock - since:.0f} s " if number == wait.number else "a moment "

    def _summary(self, reports: dict[int, AlarmReport], remedy: str) -> str:
        """Who is to blame, as far as it can be told, and what to do."""
        stopped = {int(r): why for one in reports.values() for r, why in one.stopped.items()}
        missing = [r for r in range(len(self._processes)) if r not in reports]
        ended = sorted(self._alarm.ended())
        busy = sorted(rank for rank, one in reports.items() if not one.waits and rank not in ended)
        said = []
        if not self._alarm.reaches:
            missing = sorted(stopped)
        for rank in missing[:8]:
            why = f"which is {stopped[rank]}" if rank in stopped else _UNKNOWN
            said.append(f"nothing was heard of rank {rank} ({self._processes[rank]}), {why}")
        if len(missing) > 8:
            said.append(f"nor of {len(missing) - 8} more ranks")
        failed = any(one.raised and not one.waits for one in reports.values())
        if busy and not failed:
            said.append(f"{_ranks_text(busy)} did not come: see above what is done there")
        if ended:
            said.append(
                f"{_ranks_text(ended)} ended the program while others waited: by sys.exit, or "
                "after fewer steps"
            )
        parted = check.where_they_parted({rank: one.done for rank, one in reports.items()})
        if parted:
            said.append(f"{parted}; {check.how_to_switch_on()}")
        elif not said and not failed and self._alarm.reaches:
            said.append(
                "all ranks wait, for each other: look for control flow that depends on the rank, "
                f"which {limit.setting('check', True)} finds"
            )
        if failed or ended:
            return f"{'; '.join(said) or 'see above'}. The job ends"
        return (
            f"{'; '.join(said) or 'some rank did not come'}. The job ends. If ranks have reason to "
            "wait so long (validation, storage, a first step that compiles): raise "
            f"{remedy or limit.how_to_raise()}"
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 5 and 7 more"."""
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
