"""Peak memory of a range of parts, from the lifetimes of memory in a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spatialdl.spatial.streaming.ledger import Ledger, StorageRecord

Ints = NDArray[np.int64]


class Sum(NamedTuple):
    """Bytes that are held in the backward of parts, from the first to the last."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Lives:
    """Lifetimes of the memories of a run; an entry each.

    A memory lives at the moments ``[born, died)``; a moment is an operation.

    Attributes:
        part: that allocated it.
        bytes: 0 for memories that are not counted.
        is_gradient: whether it is the gradient of a weight.
        moments: the part of each.
        rooms: workspace of each operation in bytes.
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
        """Bytes held from forward to backward: saved tensors, and outputs for later stages.

        Args:
            first, after: the parts ``[first, after)``.
            given: memories that are held until the end of backward.
        """
        own = self._made(first, after) & (self.born < self.since)
        own &= (self.died > self.since) | self._among(given)
        return int(self.bytes[own].sum())

    def repeated(self, times: int) -> Lives:
        """Lifetimes of `times` virtual tiles that reach the same operations together.

        Tiles share gradients of weights, and compute one at a time.
        """
        return replace(self, bytes=np.where(self.is_gradient, self.bytes, times * self.bytes))

    def forward_peak(self, first: int, after: int) -> int:
        """Peak bytes in forward of memory that the parts have allocated."""
        own = self._made(first, after) & (self.born < self.since)
        return self._most(self._alive(own, self.died), self._during(first, after, forward=True))

    def backward_peaks(
        self, first: int, after: int, given: Collection[int], sums: Sequence[Sum], loss: bool
    ) -> tuple[int, int]:
        """Peak bytes in backward, with held outputs and gradients of own weights.

        Args:
            sums: memory beside that of the run.
            loss: whether part ``after`` is the loss, whose forward counts, too.

        Returns:
            The peak on top of existing gradients of all weights, including those that a running
            part allocates anew; and the peak of a first backward that allocates them one by one.
        """
        stop = after + loss
        own = self._made(first, stop)
        alive = self._alive(own & ~self.is_gradient, np.where(self._among(given), _EVER, self.died))
        gradients = self._alive(own & self.is_gradient, self.died)
        during = self._during(first, stop, forward=False)
        for addend in sums:
            at = (self.moments >= addend.first) & (self.moments <= addend.last)
            alive = alive + addend.bytes * (at & during)
        begins = np.flatnonzero(np.diff(self.moments, prepend=-1))
        before = np.concatenate([[0], gradients])[begins]
        new = gradients - np.repeat(before, np.diff(begins, append=len(self.moments)))
        if loss:
            during |= self._during(after, stop, forward=True)
        return self._most(alive + new, during), self._most(alive + gradients, during)

    def _made(self, first: int, after: int) -> NDArray[np.bool_]:
        return (self.part >= first) & (self.part < after)

    def _among(self, memories: Collection[int]) -> NDArray[np.bool_]:
        is_among = np.zeros(len(self.part), dtype=bool)
        is_among[list(memories)] = True
        return is_among

    def _during(self, first: int, after: int, forward: bool) -> NDArray[np.bool_]:
        times = np.arange(len(self.moments))
        own = (self.moments >= first) & (self.moments < after)
        return own & ((times < self.since) if forward else (times >= self.since))

    def _alive(self, which: NDArray[np.bool_], died: Ints) -> Ints:
        """Allocated bytes at each moment."""
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
    """Lifetimes of the memories of a ledger.

    Args:
        memories: those to count; other memories count as empty.
        rooms: workspace of the operation at each moment, in bytes.
        since: the moment at which backward begins.
        gradients: ids of the memories of weight gradients.
    """
    counted = set(map(id, memories))
    everything = ledger.memories
    return Lives(
        part=np.array([record.part for record in everything], dtype=np.int64),
        born=np.array([record.born for record in everything], dtype=np.int64),
        died=np.array(
            [_EVER if record.died is None else record.died for record in everything], dtype=np.int64
        ),
        bytes=np.array(
            [record.taken * (id(record) in counted) for record in everything], dtype=np.int64
        ),
        is_gradient=np.array([id(record) in gradients for record in everything], dtype=bool),
        moments=np.array([operation.part for operation in ledger.moments], dtype=np.int64),
        rooms=np.array(rooms, dtype=np.int64),
        since=since,
    )


def lives_between(a: Lives, b: Lives, share: float) -> Lives | None:
    """Extrapolate linearly from `a` (share 0) through `b` (share 1).

    Returns:
        None if the two runs had different operations.
    """
    same = ("part", "born", "died", "is_gradient", "moments")
    if any(not np.array_equal(getattr(a, key), getattr(b, key)) for key in same):
        return None
    sizes = {
        key: np.rint(getattr(a, key) + share * (getattr(b, key) - getattr(a, key))).astype(np.int64)
        for key in ("bytes", "rooms")
    }
    return replace(a, **sizes)
