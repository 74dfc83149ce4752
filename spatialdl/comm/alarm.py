"""How ranks hear that one of them waits too long, while what they do themselves is stuck.

By messages of MPI between the watchdogs' threads; where there is no MPI by the store of
torch.distributed, which is asked by a thread of its own: it may be on the rank that hangs.
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
"""Characters that a rank tells: MPI sends short messages without asking the receiver."""

_ASK, _ENDED = "ask", "ended"  # beside reports, which begin with the rank


class AlarmReport(NamedTuple):
    """What a rank tells the others.

    Attributes:
        raised: whether it waits too long itself; else it only answers.
        waits: whether it waits for other ranks.
        stopped: ranks of its machine that run no longer, and what the kernel says of them.
        done: what it has done last with others, see `check.done_last`.
    """

    rank: int
    text: str
    raised: bool
    waits: bool
    stopped: dict[str, str]
    done: Sequence[CommCall] = ()


class Alarm(Protocol):
    """Told once a process: then the job ends."""

    reaches: bool
    """Whether other ranks hear it, as far as is known."""

    def tell(self, report: AlarmReport) -> None:
        """To all ranks if `raised`; else to those that have raised an alarm."""

    def heard(self) -> dict[int, AlarmReport]:
        """By rank what others have told so far; does not wait."""

    def ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks for which this one waits to say so if they have ended their program."""

    def ended(self) -> set[int]:
        """Those of the asked ranks that have ended."""

    def leave(self) -> None:
        """Say so when asked, until all ranks have ended; where no rank can be asked, return."""

    def close(self) -> None:
        """Listen no more."""


def alarm_between(world: Communicator) -> Alarm:
    """All ranks of the world make it together."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.COMM_WORLD.size == world.size:
        return ByMessages() if mpi.Query_thread() == mpi.THREAD_MULTIPLE else Unheard()
    return ByStore(world.rank, world.size)


class Unheard:
    """Where MPI takes calls from one thread only: each rank finds out by itself."""

    reaches = False

    def tell(self, report: AlarmReport) -> None:
        return None

    def heard(self) -> dict[int, AlarmReport]:
        return {}

    def ask(self, ranks: Sequence[int]) -> None:
        return None

    def ended(self) -> set[int]:
        return set()

    def leave(self) -> None:
        return None

    def close(self) -> None:
        return None


class ByMessages:
    """Over a communicator that nobody else uses."""

    reaches = True

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self._own: AlarmReport | None = None
        self._heard: dict[int, AlarmReport] = {}
        self._told: set[int] = {self._comm.rank}
        self._asked_by: set[int] = set()
        self._ended: set[int] = set()
        self._has_ended = False
        self._lock = Lock()
        self._sent: list[MPI.Request] = []  # never waited for: some rank takes no messages

    def tell(self, report: AlarmReport) -> None:
        self._own = report
        if report.raised:
            self._send_to(range(self._comm.size))
        self.heard()

    def heard(self) -> dict[int, AlarmReport]:
        from mpi4py import MPI

        if MPI.Is_finalized():  # by the program itself
            return {}
        with self._lock:
            while self._comm.iprobe():
                self._take(self._comm.recv())
            if self._has_ended:
                for rank in self._asked_by:
                    self._sent.append(self._comm.isend((_ENDED, self._comm.rank), rank))
                self._asked_by.clear()
        if self._own is not None:
            self._send_to([report.rank for report in self._heard.values() if report.raised])
        return self._heard

    def _take(self, message: Any) -> None:
        kind, rank = message[0], message[1]
        if kind == _ASK:
            self._asked_by.add(rank)
        elif kind == _ENDED:
            self._ended.add(rank)
        else:
            report = AlarmReport(*message)
            self._heard[report.rank] = report

    def ask(self, ranks: Sequence[int]) -> None:
        self._sent += [self._comm.isend((_ASK, self._comm.rank), rank) for rank in ranks]

    def ended(self) -> set[int]:
        return self._ended

    def leave(self) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        self._has_ended = True
        pause, all_ended = 1e-3, self._comm.Ibarrier()
        while not all_ended.Test():
            self.heard()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def close(self) -> None:
        return None

    def _send_to(self, ranks: range | list[int]) -> None:
        new = [rank for rank in ranks if rank not in self._told]
        self._told.update(new)
        self._sent += [self._comm.isend(tuple(self._own or ()), rank) for rank in new]


class ByStore:
    """Over keys of the store with which torch.distributed was initialised."""

    reaches = False
    LOOK_S = 1.0

    def __init__(self, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        with suppress(Exception):  # not every kind can have a connection more
            store = store.clone()  # type: ignore[attr-defined]
        self._store: Store = PrefixStore("spatialdl/alarm", store)
        self._rank, self._size = rank, size
        self._own: AlarmReport | None = None
        self._heard: dict[int, AlarmReport] = {}
        self._lock, self._stop, self._told = Lock(), Event(), Event()
        self._thread = Thread(target=self._listen, name="alarm", daemon=True)
        self._thread.start()

    def tell(self, report: AlarmReport) -> None:
        self._own = report
        self._told.set()

    def heard(self) -> dict[int, AlarmReport]:
        with self._lock:
            return dict(self._heard)

    def ask(self, ranks: Sequence[int]) -> None:
        return None  # the end of a rank closes its connections, which is noticed

    def ended(self) -> set[int]:
        return set()

    def leave(self) -> None:
        return None

    def close(self) -> None:
        self._stop.set()
        self._told.set()
        self._thread.join(self.LOOK_S)

    def _listen(self) -> None:
        with suppress(Exception):  # the store has gone, and so has its rank
            while not self._stop.is_set() and not self._store.check(["raised"]):
                if self._told.wait(self.LOOK_S) and self._own is not None:
                    break
            while not self._stop.is_set():
                self._pass_on()
                time.sleep(0.1)

    def _pass_on(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._store.set(str(self._rank), json.dumps(own))
            if own.raised:
                self._store.set("raised", "yes")
        for rank in range(self._size):
            if rank not in self._heard and rank != self._rank and self._store.check([str(rank)]):
                report = AlarmReport(*json.loads(self._store.get(str(rank))))
                report = report._replace(done=tuple(CommCall(*one) for one in report.done))
                with self._lock:
                    self._heard[rank] = report
        self.reaches = True
