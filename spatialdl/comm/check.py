"""``comm.check``: compares what ranks are about to communicate.

A rank on another branch than its peers would hang or, worse, sum unrelated numbers. With the check
on, every communication first compares its description (operation, direction, plan) between
peers, and a mismatch aborts the job and names both sides.

Without it the last descriptions are kept: where a message does not fit, or ranks wait too long,
they show where ranks diverged.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

from spatialdl.comm.waiting import setting
from spatialdl.errors import CommMismatch

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

KEPT, KEPT_GROUPS, KEPT_CHARACTERS = 8, 3, 70
_VARIABLE = "SPATIALDL_COMM_CHECK"
_TRANSPORT_ERRORS = (  # of gloo and MPICH, for messages of unexpected size
    "op.preamble.length",
    "collective mismatch",
    "message sizes do not match",
)


class _Switch:
    on = os.environ.get(_VARIABLE, "") == "1"


def enable(on: bool = True) -> None:
    """Switch the check on or off; collective."""
    _Switch.on = on


def enabled() -> bool:
    return _Switch.on


def agree(comm: Communicator, what: object) -> None:
    """Compare ``str(what)`` over the ranks of `comm` if the check is on; else record it.

    Raises:
        CommMismatch: names the first rank whose description differs.
    """
    if not _Switch.on:
        _record(comm, what)
        return
    own = str(what)
    for rank, other in enumerate(comm.allgather(own)):
        if other != own:
            raise CommMismatch(_mismatch(comm.rank, own, rank, other))


def _mismatch(rank: int, text: str, other: int, other_text: str) -> str:
    return (
        f"ranks call different operations: rank {rank} is at '{text}', rank {other} at "
        f"'{other_text}'; look for control flow that depends on the rank"
    )


# --- without the check: the last calls of this rank


class CallHistory:
    """Last communications over one communicator.

    Attributes:
        name: identical on all of its ranks.
        count: number of all communications over it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.last: deque[object] = deque(maxlen=KEPT)


class CommCall(NamedTuple):
    """One communication, as exchanged between ranks: call `number` over `group`."""

    group: str
    number: int
    text: str


_groups: list[CallHistory] = []  # most recently used groups, the latest at the end
_made: Counter[tuple[int, ...]] = Counter()


def _record(comm: Communicator, what: object) -> None:
    if comm.size == 1:
        return
    group: CallHistory = getattr(comm, "_call_history", None) or name_group(comm)
    group.count += 1
    group.last.append(what)
    if not _groups or _groups[-1] is not group:
        _groups[:] = [*(one for one in _groups if one is not group), group][-KEPT_GROUPS:]


def name_group(comm: Communicator) -> CallHistory:
    """Name a new communicator; its ranks must name their communicators in the same order."""
    ranks = tuple(comm.world_ranks)
    group = CallHistory(f"{'-'.join(map(str, ranks[:KEPT]))}/{_made[ranks]}")
    _made[ranks] += 1
    comm._call_history = group  # type: ignore[attr-defined]
    return group


def last_calls() -> list[CommCall]:
    """Last calls of this rank in the most recently used groups."""
    return [
        CommCall(group.name, number, str(what)[:KEPT_CHARACTERS])
        for group in _groups
        for number, what in enumerate(group.last, group.count - len(group.last) + 1)
    ]


def first_mismatch(ranks: Mapping[int, Sequence[CommCall]]) -> str:
    """Message of the first mismatch between the last calls of some ranks; else empty.

    Args:
        ranks: `last_calls` of each rank.
    """
    calls: dict[tuple[str, int], dict[int, str]] = {}
    for rank, last in ranks.items():
        for call in last:
            calls.setdefault((call.group, call.number), {})[rank] = call.text
    for _, texts in sorted(calls.items()):
        first = min(texts)
        for rank, text in texts.items():
            if text != texts[first]:
                return _mismatch(first, texts[first], rank, text)
    return ""


# --- errors of the transport


def run_checked(
    comm: Communicator, do: Callable[[*Arguments], Result], *arguments: *Arguments
) -> Result:
    """Result of `do`.

    Raises:
        CommMismatch: if the transport reports a message of unexpected size.
    """
    try:
        return do(*arguments)
    except Exception as error:
        if not _is_mismatch(error):
            raise
        group: CallHistory | None = getattr(comm, "_call_history", None)
        at = f"at '{group.last[-1]}' " if group is not None and group.last else ""
        peers = [rank for rank in comm.world_ranks if rank != comm.world_ranks[comm.rank]]
        raise CommMismatch(
            f"rank {comm.world_ranks[comm.rank]} {at}received a message of unexpected size "
            f"({error}) from one of the ranks {', '.join(map(str, peers[:KEPT]))}: ranks call "
            f"different operations, or on images of different sizes; {how_to_switch_on()}"
        ) from error


def how_to_switch_on() -> str:
    return (
        f"{setting('check', True)}, or {_VARIABLE}=1 in the environment, compares the "
        "operations of ranks before each communication and names both sides"
    )


def _is_mismatch(error: Exception) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(error, mpi.Exception):
        is_size: bool = error.Get_error_class() in (mpi.ERR_TRUNCATE, mpi.ERR_IN_STATUS)
        if is_size:
            return True
    return any(words in str(error) for words in _TRANSPORT_ERRORS)
