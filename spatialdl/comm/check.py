"""``comm.check``: before ranks talk they compare what they are about to say.

A rank that takes another branch than its peers would hang or, worse, add up unrelated numbers.
With the check on, every communication first compares its own description (operation, direction,
plan) with the peers', and a difference ends the job with both sides named.

Without it the last descriptions are kept: where a message does not fit, or ranks wait too long,
they tell where ranks parted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from spatialdl.comm import limit
from spatialdl.errors import CommMismatch

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

TEXT_BYTES = 256
KEPT, KEPT_GROUPS, KEPT_CHARACTERS = 8, 3, 70
_VARIABLE = "SPATIALDL_COMM_CHECK"
_TRANSPORTS_WORDS = (  # of gloo and MPICH, for messages of other sizes than expected
    "op.preamble.length",
    "collective mismatch",
    "message sizes do not match",
)


class _Switch:
    on = os.environ.get(_VARIABLE, "") == "1"


def enable(on: bool = True) -> None:
    """Switch the check on or off; all ranks must do so alike."""
    _Switch.on = on


def enabled() -> bool:
    return _Switch.on


def agree(comm: Communicator, what: object) -> None:
    """Compare ``str(what)`` over the ranks of `comm`, if the check is on; else remember it.

    Raises:
        CommMismatch: naming the first rank that says something else.
    """
    if not _Switch.on:
        _remember(comm, what)
        return
    mine = encode(str(what))
    everybody = comm.all_gather(as_tensor(mine))
    for rank in range(comm.size):
        theirs = bytes(everybody[rank].numpy())
        if theirs != mine:
            raise CommMismatch(_parted(comm.rank, str(what), rank, decode(theirs)))


def _parted(rank: int, text: str, other: int, other_text: str) -> str:
    return (
        f"ranks do different things: rank {rank} is at '{text}', rank {other} at '{other_text}'; "
        "look for control flow that depends on the rank"
    )


def encode(text: str) -> bytes:
    """`text` as a message of fixed length."""
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def as_tensor(message: bytes) -> Tensor:
    """A message as the transports take it."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def decode(message: bytes) -> str:
    return message.rstrip(b"\0").decode(errors="replace")


# --- without the check: what this rank has done last


class CallHistory:
    """The last communications over one communicator.

    Attributes:
        name: the same on all of its ranks.
        count: of all communications over it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.last: deque[object] = deque(maxlen=KEPT)


class CommCall(NamedTuple):
    """A communication, as ranks tell each other of it: the `number` of those over a `group`."""

    group: str
    number: int
    text: str


_groups: list[CallHistory] = []  # those that talked last, the latest at the end
_made: Counter[tuple[int, ...]] = Counter()


def _remember(comm: Communicator, what: object) -> None:
    if comm.size == 1:
        return
    group: CallHistory = getattr(comm, "_done_last", None) or name_group(comm)
    group.count += 1
    group.last.append(what)
    if not _groups or _groups[-1] is not group:
        _groups[:] = [*(one for one in _groups if one is not group), group][-KEPT_GROUPS:]


def name_group(comm: Communicator) -> CallHistory:
    """Name a new communicator; its ranks must do so in the same order for all that they make."""
    ranks = tuple(comm.world_ranks)
    group = CallHistory(f"{'-'.join(map(str, ranks[:KEPT]))}/{_made[ranks]}")
    _made[ranks] += 1
    comm._done_last = group  # type: ignore[attr-defined]
    return group


def done_last() -> list[CommCall]:
    """What this rank has talked about last, in the groups that talked last."""
    return [
        CommCall(group.name, number, str(what)[:KEPT_CHARACTERS])
        for group in _groups
        for number, what in enumerate(group.last, group.count - len(group.last) + 1)
    ]


def where_they_parted(ranks: Mapping[int, Sequence[CommCall]]) -> str:
    """What the check would have said, from what some ranks have done last; or nothing.

    Args:
        ranks: `done_last` of each.
    """
    everywhere: dict[tuple[str, int], dict[int, str]] = {}
    for rank, done in ranks.items():
        for one in done:
            everywhere.setdefault((one.group, one.number), {})[rank] = one.text
    for _, texts in sorted(everywhere.items()):
        first = min(texts)
        for rank, text in texts.items():
            if text != texts[first]:
                return _parted(first, texts[first], rank, text)
    return ""


# --- errors of the transport


def understood(
    comm: Communicator, do: Callable[[*Arguments], Result], *arguments: *Arguments
) -> Result:
    """What `do` gives.

    Raises:
        CommMismatch: if the transport has had a message of another size than expected.
    """
    try:
        return do(*arguments)
    except Exception as error:
        if not _is_mismatch(error):
            raise
        group: CallHistory | None = getattr(comm, "_done_last", None)
        at = f"at '{group.last[-1]}' " if group is not None and group.last else ""
        others = [rank for rank in comm.world_ranks if rank != comm.world_ranks[comm.rank]]
        raise CommMismatch(
            f"rank {comm.world_ranks[comm.rank]} {at}got a message that does not fit "
            f"({error}), from one of the ranks {', '.join(map(str, others[:KEPT]))}: ranks do "
            f"different things, or with images of different sizes; {how_to_switch_on()}"
        ) from error


def how_to_switch_on() -> str:
    return (
        f"{limit.setting('check', True)}, or {_VARIABLE}=1 in the environment, compares what "
        "ranks do before each communication and names both sides"
    )


def _is_mismatch(error: Exception) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(error, mpi.Exception):
        found: bool = error.Get_error_class() in (mpi.ERR_TRUNCATE, mpi.ERR_IN_STATUS)
        if found:
            return True
    return any(words in str(error) for words in _TRANSPORTS_WORDS)
