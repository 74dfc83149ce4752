"""Partitions of channels over the ranks of the tensor axis, in integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from spatialdl.layout.layout import Bounds, Interval, even_bounds

FORMS = ("output", "input", "replicate")
"""Forms of a layer: its weight is divided by outputs, by inputs, or replicated."""


@dataclass(frozen=True)
class Partition:
    """A dim cut over the ranks of the tensor axis, in one or several consecutive pieces.

    Queries, keys and values from one layer are three pieces; a rank has its share of the heads of
    each.

    Attributes:
        pieces: bounds within each piece, from its start; rank r has ``[bounds[r], bounds[r + 1])``.
    """

    pieces: tuple[Bounds, ...]

    @classmethod
    def even(cls, size: int, ranks: int, unit: int = 1, pieces: int = 1) -> Partition:
        """Cut as evenly as integers allow.

        Args:
            unit: number of channels that stay together; divides the size of a piece.
            pieces: number of consecutive pieces of equal size.
        """
        bounds = even_bounds(size // pieces // unit, ranks)
        return cls((tuple(bound * unit for bound in bounds),) * pieces)

    @property
    def ranks(self) -> int:
        return len(self.pieces[0]) - 1

    @cached_property
    def size(self) -> int:
        """Size of the whole dim."""
        return sum(bounds[-1] for bounds in self.pieces)

    def held(self, rank: int) -> tuple[Interval, ...]:
        """Intervals of the whole dim that a rank holds, one for each piece."""
        intervals, start = [], 0
        for bounds in self.pieces:
            intervals.append((start + bounds[rank], start + bounds[rank + 1]))
            start += bounds[-1]
        return tuple(intervals)

    def size_of(self, rank: int) -> int:
        """Number of entries that a rank holds."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.pieces)

    @property
    def covers_all_ranks(self) -> bool:
        """Whether every rank has something of every piece."""
        return all(start < stop for bounds in self.pieces for start, stop in pairwise(bounds))

    def times(self, factor: int) -> Partition:
        """Partition of a dim in which each entry is expanded to `factor` consecutive entries."""
        return Partition(tuple(tuple(b * factor for b in bounds) for bounds in self.pieces))

    def over(self, factor: int) -> Partition | None:
        """Inverse of `times`; None if a bound is not divisible."""
        if any(bound % factor for bounds in self.pieces for bound in bounds):
            return None
        return Partition(tuple(tuple(b // factor for b in bounds) for bounds in self.pieces))

    def part(self, start: int, stop: int) -> Partition | None:
        """Partition of the dim from `start` to `stop`; None unless these are bounds of pieces."""
        pieces, at = [], 0
        for bounds in self.pieces:
            if start <= at and at + bounds[-1] <= stop:
                pieces.append(bounds)
            at += bounds[-1]
        partition = Partition(tuple(pieces)) if pieces else None
        return partition if partition is not None and partition.size == stop - start else None


def joined(partitions: Sequence[Partition]) -> Partition:
    """Partition of concatenated dims."""
    return Partition(tuple(bounds for one in partitions for bounds in one.pieces))
