"""How much of what a run has made lives at once in a range of its parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spatialdl.planning.ledger import Ledger, StorageRecord

Ints = NDArray[np.int64]


class Sum(NamedTuple):
    """Bytes that live in the backward of parts, from the first to the last."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Lives:
    """The memories of a run; an entry each.

    A memory lives at the moments ``[born, died)``; a moment is an operation.

    Attributes:
        part: that has made it.
        bytes: 0 for those that do not count.
        is_gradient: whether it is the gradient of a weight.
        moments: the part of each.
        rooms: bytes that each operation needs for itself.
        since: the moment at which backward begins.
    """

    part: Ints
    born: Ints
    died: Ints
    bytes: Ints
    is_gradient: NDArray[np.bool_]
    moments: Ints
    rooms: Ints
    since: int

    def held(self, first: int, after: int, given: Collection[int]) -> int:
        """Bytes from forward to backward: what backward needs, and what is given to others.

        Args:
            first, after: the parts ``[first, after)``.
            given: memories that are held until backward is over.
        """
        own = self._made(first, after) & (self.born < self.since)
        own &= (self.died > self.since) | self._among(given)
        return int(self.bytes[own].sum())

    def repeated(self, times: int) -> Lives:
        """Of so many virtual tiles that come to the same operations together.

        Gradients of weights they share, and one of them computes at a time.
        """
        return replace(self, bytes=np.where(self.is_gradient, self.bytes, times * self.bytes))

    def forward_peak(self, first: int, after: int) -> int:
        """Most bytes at a time of what the parts have made, in forward."""
        own = self._made(first, after) & (self.born < self.since)
        return self._most(self._alive(own, self.died), self._during(first, after, forward=True))

    def backward_peaks(
        self, first: int, after: int, given: Collection[int], sums: Sequence[Sum], loss: bool
    ) -> tuple[int, int]:
        """Most bytes at a time in backward, with what is given and gradients of own weights.

        Args:
            sums: what lives beside the memories of the run.
            loss: whether the part ``after`` is the loss, of which the forward counts, too.

        Returns:
            Where the weights have gradients before, beside these: while a part runs, its new ones
            come to them. And where they come one after the other.
        """
        stop = after + loss
        own = self._made(first, stop)
        alive = self._alive(own & ~self.is_gradient, np.where(self._among(given), _EVER, self.died))
        gradients = self._alive(own & self.is_gradient, self.died)
        during = self._during(first, stop, forward=False)
        for one in sums:
            at = (self.moments >= one.first) & (self.moments <= one.last)
            alive = alive + one.bytes * (at & during)
        begins = np.flatnonzero(np.diff(self.moments, prepend=-1))
        before = np.concatenate([[0], gradients])[begins]
        new = gradients - np.repeat(before, np.diff(begins, append=len(self.moments)))
        if loss:
            during |= self._during(after, stop, forward=True)
        return self._most(alive + new, during), self._most(alive + gradients, during)

    def _made(self, first: int, after: int) -> NDArray[np.bool_]:
        return (self.part >= first) & (self.part < after)

    def _among(self, memories: Collection[int]) -> NDArray[np.bool_]:
        found = np.zeros(len(self.part), dtype=bool)
        found[list(memories)] = True
        return found

    def _during(self, first: int, after: int, forward: bool) -> NDArray[np.bool_]:
        times = np.arange(len(self.moments))
        own = (self.moments >= first) & (self.moments < after)
        return own & ((times < self.since) if forward else (times >= self.since))

    def _alive(self, which: NDArray[np.bool_], died: Ints) -> Ints:
        """Bytes at each moment."""
        count = len(self.moments)
        changes = np.zeros(count + 1, dtype=np.int64)
        np.add.at(changes, np.minimum(self.born[which], count), self.bytes[which])
        np.add.at(changes, np.minimum(died[which], count), -self.bytes[which])
        return np.cumsum(changes)[:count]

    def _most(self, alive: Ints, during: NDArray[np.bool_]) -> int:
        return int((alive + self.rooms)[during].max(initial=0))


_EVER = np.iinfo(np.int64).max


def lives(
    ledger: Ledger,
    memories: Sequence[StorageRecord],
    rooms: Sequence[int],
    since: int,
    gradients: Collection[int],
) -> Lives:
    """The memories of a ledger.

    Args:
        memories: those that count; others count as empty.
        rooms: by moment, bytes that the operation needs for itself.
        since: the moment at which backward begins.
        gradients: ids of the memories of weights' gradients.
    """
    counting = set(map(id, memories))
    everything = ledger.memories
    return Lives(
        part=np.array([one.part for one in everything], dtype=np.int64),
        born=np.array([one.born for one in everything], dtype=np.int64),
        died=np.array(
            [_EVER if one.died is None else one.died for one in everything], dtype=np.int64
        ),
        bytes=np.array([one.taken * (id(one) in counting) for one in everything], dtype=np.int64),
        is_gradient=np.array([id(one) in gradients for one in everything], dtype=bool),
        moments=np.array([one.part for one in ledger.moments], dtype=np.int64),
        rooms=np.array(rooms, dtype=np.int64),
        since=since,
    )


def lives_between(a: Lives, b: Lives, share: float) -> Lives | None:
    """Memories on the straight line from `a` (share 0) through `b` (share 1).

    Returns:
        None if the two did not do the same operations.
    """
    same = ("part", "born", "died", "is_gradient", "moments")
    if any(not np.array_equal(getattr(a, key), getattr(b, key)) for key in same):
        return None
    sizes = {
        key: np.rint(getattr(a, key) + share * (getattr(b, key) - getattr(a, key))).astype(np.int64)
        for key in ("bytes", "rooms")
    }
    return replace(a, **sizes)
