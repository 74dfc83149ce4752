"""Calls of this process over MPI, each with a timeout after which the job ends.

A thread looks at the calls that have begun. A call that takes too long ends the job, because MPI
cannot undo it, and is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from threading import Thread, get_ident
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

MANY = 32

LOOK_S = 0.5
OTHERS_S = 2.0
"""How long other ranks, whose calls take too long as well, have to say so."""

Job = Callable[[], object]


class Group(NamedTuple):
    """Identity of a group in messages.

    Attributes:
        name: given by torch.distributed.
        ranks: world ranks, in the order of the group.
        rank: world rank of this process.
        title: description, shown instead of the name.
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
        group: its group.
        name: as in torch.distributed.
        tensors: tensors of this rank.
        timeout_s: timeout after which the job aborts.
        options: of torch.distributed, with reduction and root if the operation has them.
        words: further details for messages.
    """

    __slots__ = ("group", "name", "options", "tensors", "timeout_s", "words")

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

    def run(self, job: Job) -> None:
        """Run the job, and end all ranks if it exceeds the timeout.

        Raises:
            RuntimeError: if MPI fails, naming the operation.
        """
        thread = get_ident()
        outer = _begun.get(thread)
        _begun[thread] = self, _Clock.seconds + self.timeout_s
        try:
            around(self, job)
        except MPI.Exception as error:
            raise RuntimeError(f"{self} in {self.group} failed: {error}") from error
        finally:
            if outer is None:
                del _begun[thread]
            else:
                _begun[thread] = outer

    def __str__(self) -> str:
        shown = [describe(tensor) for tensor in self.tensors[:4]]
        if len(self.tensors) > 4:
            shown.append(f"{len(self.tensors) - 4} more")
        tensors = f" of {', '.join(shown)}" if shown else ""
        return f"{self.name}{tensors}{self.detail}"

    @property
    def detail(self) -> str:
        """Details besides name and tensors."""
        op = getattr(self.options, "reduceOp", None)
        root = getattr(self.options, "rootRank", None)
        by = f" by {op.op.name}" if op is not None else ""
        at = f" with root {self.group.ranks[root]}" if root is not None else ""
        return f"{by}{at}{self.words}"


def describe(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def seconds(timeout: timedelta, default: float) -> float:
    """Seconds of a timeout; `default` for a negative one, which means unset."""
    return timeout.total_seconds() if timeout > _NONE else default


_NONE = timedelta(0)


class _Clock:
    seconds = 0.0
    """Since the start of the thread; a job that is suspended as a whole stops it."""


_begun: dict[int, tuple[Call, float]] = {}
"""The call that each thread has begun, and when it must have ended."""


def _run(call: Call, job: Job) -> None:
    job()


around: Callable[[Call, Job], object] = _run
"""Runs the job of a call; a program may record it as well."""


def _abort() -> None:
    MPI.COMM_WORLD.Abort(1)


end_job: Callable[[], object] = _abort
"""Ends all ranks; a program may end them by other means."""


@cache
def watch_calls() -> None:
    """Start the thread that ends the job if a call exceeds its timeout."""
    Thread(target=_watch, name="mpi4py timeouts", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        _Clock.seconds += LOOK_S
        _look()


def _look() -> None:
    """Look once; the thread itself would keep the call that it saw last, and so its tensors."""
    for call, until in list(_begun.values()):
        if _Clock.seconds > until:
            raise_limit = "raise the timeout of init_process_group or new_group"
            fail(call, f"took longer than the timeout of {call.timeout_s:g} s, {raise_limit}")


def fail(call: Call, why: str) -> None:
    """End the job because of a call in a thread whose exceptions are not propagated."""
    text = f"spatialdl: rank {call.group.rank}: {call} in {call.group} {why}; aborting the job"
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"{text}\n")  # at once: launchers mix partial lines
        sys.__stderr__.flush()
    time.sleep(OTHERS_S)
    end_job()
