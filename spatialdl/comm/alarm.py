"""Propagates timeouts between watchdogs while main threads block.

Uses MPI messages between the watchdog threads; without MPI the store of torch.distributed, polled
by a separate thread because the store may be on the rank that hangs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from spatialdl.comm.check import CommCall
from spatialdl.comm.communicator import Communicator

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MOST = 2000
"""Maximum length of a report in characters: MPI sends short messages eagerly."""

_QUERY, _EXITED = "ask", "ended"  # beside reports, which begin with the rank


class AlarmReport(NamedTuple):
    """Report of a rank.

    Attributes:
        raised: whether this rank raised the alarm; else it responds to one.
        waits: whether it waits for other ranks.
        stopped: processes on its node that are not running, and their state in the kernel.
        calls: its last communications, see `check.last_calls`.
    """

    rank: int
    text: str
    raised: bool
    waits: bool
    stopped: dict[str, str]
    calls: Sequence[CommCall] = ()


class Alarm(Protocol):
    """Channel between watchdogs; at most one report per process, then the job aborts."""

    reaches: bool
    """Whether other ranks receive reports, as far as known."""

    def send(self, report: AlarmReport) -> None:
        """Send to all ranks if `raised`; else to those that have raised an alarm."""

    def received(self) -> dict[int, AlarmReport]:
        """Reports received so far, by rank; does not block."""

    def query_exit(self, ranks: Sequence[int]) -> None:
        """Request a notice from `ranks` once they exit; this rank waits for them."""

    def exited(self) -> set[int]:
        """Queried ranks that have exited."""

    def serve_until_all_exit(self) -> None:
        """Answer queries until all ranks have exited; return at once where unsupported."""

    def close(self) -> None:
        """Stop listening."""


def alarm_between(world: Communicator) -> Alarm:
    """Open the alarm; collective over the world."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.COMM_WORLD.size == world.size:
        return ByMessages() if mpi.Query_thread() == mpi.THREAD_MULTIPLE else Unheard()
    return ByStore(world.rank, world.size)


class Unheard:
    """No channel, as MPI allows calls from one thread only: each rank acts independently."""

    reaches = False

    def send(self, report: AlarmReport) -> None:
        return None

    def received(self) -> dict[int, AlarmReport]:
        return {}

    def query_exit(self, ranks: Sequence[int]) -> None:
        return None

    def exited(self) -> set[int]:
        return set()

    def serve_until_all_exit(self) -> None:
        return None

    def close(self) -> None:
        return None


class ByMessages:
    """Alarm over a separate MPI communicator."""

    reaches = True

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self._own: AlarmReport | None = None
        self._reports: dict[int, AlarmReport] = {}
        self._sent_to: set[int] = {self._comm.rank}
        self._queried_by: set[int] = set()
        self._exited: set[int] = set()
        self._has_exited = False
        self._lock = Lock()
        self._sent: list[MPI.Request] = []  # never waited for: a hanging rank receives nothing

    def send(self, report: AlarmReport) -> None:
        self._own = report
        if report.raised:
            self._send_to(range(self._comm.size))
        self.received()

    def received(self) -> dict[int, AlarmReport]:
        from mpi4py import MPI

        if MPI.Is_finalized():  # by the user's program
            return {}
        with self._lock:
            while self._comm.iprobe():
                self._handle(self._comm.recv())
            if self._has_exited:
                for rank in self._queried_by:
                    self._sent.append(self._comm.isend((_EXITED, self._comm.rank), rank))
                self._queried_by.clear()
        if self._own is not None:
            self._send_to([report.rank for report in self._reports.values() if report.raised])
        return self._reports

    def _handle(self, message: Any) -> None:
        kind, rank = message[0], message[1]
        if kind == _QUERY:
            self._queried_by.add(rank)
        elif kind == _EXITED:
            self._exited.add(rank)
        else:
            report = AlarmReport(*message)
            self._reports[report.rank] = report

    def query_exit(self, ranks: Sequence[int]) -> None:
        self._sent += [self._comm.isend((_QUERY, self._comm.rank), rank) for rank in ranks]

    def exited(self) -> set[int]:
        return self._exited

    def serve_until_all_exit(self) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        self._has_exited = True
        pause, all_exited = 1e-3, self._comm.Ibarrier()
        while not all_exited.Test():
            self.received()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def close(self) -> None:
        return None

    def _send_to(self, ranks: range | list[int]) -> None:
        new = [rank for rank in ranks if rank not in self._sent_to]
        self._sent_to.update(new)
        self._sent += [self._comm.isend(tuple(self._own or ()), rank) for rank in new]


class ByStore:
    """Alarm over keys of the store of torch.distributed."""

    reaches = False
    LOOK_S = 1.0

    def __init__(self, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from spatialdl.torch_internals import default_store

        store = default_store()
        with suppress(Exception):  # not every kind of store can be cloned
            store = store.clone()  # type: ignore[attr-defined]
        self._store: Store = PrefixStore("spatialdl/alarm", store)
        self._rank, self._size = rank, size
        self._own: AlarmReport | None = None
        self._reports: dict[int, AlarmReport] = {}
        self._lock, self._stop, self._has_report = Lock(), Event(), Event()
        self._thread = Thread(target=self._listen, name="alarm", daemon=True)
        self._thread.start()

    def send(self, report: AlarmReport) -> None:
        self._own = report
        self._has_report.set()

    def received(self) -> dict[int, AlarmReport]:
        with self._lock:
            return dict(self._reports)

    def query_exit(self, ranks: Sequence[int]) -> None:
        return None  # an exit closes connections, which peers detect

    def exited(self) -> set[int]:
        return set()

    def serve_until_all_exit(self) -> None:
        return None

    def close(self) -> None:
        self._stop.set()
        self._has_report.set()
        self._thread.join(self.LOOK_S)

    def _listen(self) -> None:
        with suppress(Exception):  # the store is gone with its rank
            while not self._stop.is_set() and not self._store.check(["raised"]):
                if self._has_report.wait(self.LOOK_S) and self._own is not None:
                    break
            while not self._stop.is_set():
                self._exchange_reports()
                time.sleep(0.1)

    def _exchange_reports(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._store.set(str(self._rank), json.dumps(own))
            if own.raised:
                self._store.set("raised", "yes")
        for rank in range(self._size):
            if rank not in self._reports and rank != self._rank and self._store.check([str(rank)]):
                report = AlarmReport(*json.loads(self._store.get(str(rank))))
                report = report._replace(calls=tuple(CommCall(*call) for call in report.calls))
                with self._lock:
                    self._reports[rank] = report
        self.reaches = True
