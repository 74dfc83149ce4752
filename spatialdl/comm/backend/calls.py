"""What this process is doing over MPI, so that nothing waits for ever without a word.

Every operation of the `mpi4py` backend is noted here while it runs. A thread looks at the notes;
when one has outlived its timeout, the ranks tell each other what they are waiting for, one of them
prints it, and the job ends. There is no way back: MPI cannot take a collective back that some ranks
have begun, so an exception in one thread would leave the others in it for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.roll_call import say
from spatialdl.comm.waiting import noted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LOOK_S = 0.25
GRACE_S = 1.0
"""How long ranks that time out at about the same time wait for what the others say."""
MANY = 32

Job = Callable[[], object]


class Group(NamedTuple):
    """A group as messages name it.

    Attributes:
        name: that torch.distributed gave it.
        ranks: of the world, in the order of the group.
        rank: of this process in the world.
        title: what messages call it.
    """

    name: str
    ranks: Sequence[int]
    rank: int
    title: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:MANY]))
        more = f" and {len(self.ranks) - MANY} more" if len(self.ranks) > MANY else ""
        return f"group '{self.title or self.name}' (ranks {ranks}{more})"


class Call:
    """An operation of this rank.

    Args:
        group: in which it is done.
        name: as in torch.distributed.
        tensors: of this rank.
        timeout_s: after which the job ends.
        options: of torch.distributed, with reduction and root if the operation has them.
        words: whatever else tells it apart.
    """

    __slots__ = ("group", "name", "options", "started", "tensors", "timeout_s", "words")

    def __init__(
        self,
        group: Group,
        name: str,
        tensors: Sequence[Tensor],
        timeout_s: float,
        options: Any = None,
        words: str = "",
    ) -> None:
        self.group, self.name, self.tensors = group, name, tensors
        self.timeout_s, self.options, self.words = timeout_s, options, words
        self.started = 0.0

    def run(self, job: Job) -> None:
        """Do the job, noted as running.

        Raises:
            RuntimeError: if MPI fails, naming the operation.
        """
        self.started = time.monotonic()
        _running[id(self)] = self
        try:
            noted(self, self.group.ranks, job)
        except MPI.Exception as error:
            raise RuntimeError(f"{self} in {self.group} failed: {error}") from error
        finally:
            del _running[id(self)]

    def __str__(self) -> str:
        shown = [describe(tensor) for tensor in self.tensors[:4]]
        if len(self.tensors) > 4:
            shown.append(f"{len(self.tensors) - 4} more")
        tensors = f" of {', '.join(shown)}" if shown else ""
        return f"{self.name}{tensors}{self.detail}"

    @property
    def detail(self) -> str:
        """What tells it apart besides name and tensors."""
        op = getattr(self.options, "reduceOp", None)
        root = getattr(self.options, "rootRank", None)
        by = f" by {op.op.name}" if op is not None else ""
        at = f" with root {self.group.ranks[root]}" if root is not None else ""
        return f"{by}{at}{self.words}"


_running: dict[int, Call] = {}


def describe(tensor: Tensor) -> str:
    """Type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def seconds(timeout: timedelta, default: float) -> float:
    """Seconds of a timeout; the default for the negative one that says that none was given."""
    return timeout.total_seconds() if timeout > _NONE else default


_NONE = timedelta(0)


class Watchdog:
    """Ends the job when a call has outlived its timeout.

    Args:
        store: over which ranks tell what they wait for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop = Event()
        self._thread = Thread(target=self._look, name="mpi4py watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look_once()  # what it has looked at must not be kept alive until the next time

    def _look_once(self) -> None:
        now = time.monotonic()
        for call in list(_running.values()):
            if now - call.started > call.timeout_s:
                self._tell(call)
                end_job_for_sure()

    def _tell(self, call: Call) -> None:
        """Print what all ranks of the group wait for, on one rank; the others leave it to that."""
        found: list[str | None] = []
        talk = Thread(target=lambda: found.append(self._ask(call)), daemon=True)
        talk.start()
        talk.join(2 * GRACE_S + 2)  # the rank that holds the store may be the one that hangs
        if not found:
            found = [f"{_overdue(call)}, and the store of rank 0 does not answer"]
        if found[0] is None:
            time.sleep(2 * GRACE_S)
        else:
            say(f"spatialdl: {found[0]}; ending the job")

    def _ask(self, call: Call) -> str | None:
        try:
            prefix = f"overdue/{call.group.name}"
            first = self._store.add(prefix, 1) == 1
            self._store.set(f"{prefix}/{call.group.rank}", f"{call} for {_waited(call):.0f} s")
            if not first:
                return None
            time.sleep(GRACE_S)
            others = [
                self._state(prefix, rank) for rank in call.group.ranks if rank != call.group.rank
            ]
        except Exception as error:
            return f"{_overdue(call)}; the store is gone: {str(error).splitlines()[0]}"
        return "; ".join([_overdue(call), *others])

    def _state(self, prefix: str, rank: int) -> str:
        key = f"{prefix}/{rank}"
        if self._store.check([key]):
            return f"rank {rank} waits in {self._store.get(key).decode()}"
        return f"rank {rank} has not come and says nothing: it is computing, stopped or dead"


def _waited(call: Call) -> float:
    return time.monotonic() - call.started


def _overdue(call: Call) -> str:
    return (
        f"rank {call.group.rank} waits in {call} for {_waited(call):.0f} s in {call.group}, longer "
        f"than the timeout of {call.timeout_s:g} s"
    )


def fail(call: Call, error: BaseException) -> None:
    """End the job because of an error where no one would see an exception."""
    say(
        f"spatialdl: rank {call.group.rank}: {call} in {call.group} failed: {error}; ending the job"
    )
    end_job_for_sure()
