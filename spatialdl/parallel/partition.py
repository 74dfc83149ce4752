"""Partitions: which channels of a dim each rank of the tensor axis has. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from spatialdl.parallel.layout import Bounds, Interval, even_bounds

FORMS = ("output", "input", "replicate")
"""What can be asked for: that a layer's weight is divided by its outputs, by its inputs, or not."""


@dataclass(frozen=True)
class Partition:
    """A dim cut over the ranks of the tensor axis, in one piece or in several after each other.

    Queries, keys and values that one layer gives are three pieces, of each of which a rank has its
    share of the heads.

    Attributes:
        pieces: where each piece is cut, counted from its own start; rank r has
            ``[bounds[r], bounds[r + 1])`` of it.
    """

    pieces: tuple[Bounds, ...]

    @classmethod
    def even(cls, size: int, ranks: int, unit: int = 1, pieces: int = 1) -> Partition:
        """Cut as evenly as integers allow.

        Args:
            unit: channels that stay together; divides the size of a piece.
            pieces: of equal size, after each other.
        """
        bounds = even_bounds(size // pieces // unit, ranks)
        return cls((tuple(bound * unit for bound in bounds),) * pieces)

    @property
    def ranks(self) -> int:
        return len(self.pieces[0]) - 1

    @cached_property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(bounds[-1] for bounds in self.pieces)

    def held(self, rank: int) -> tuple[Interval, ...]:
        """What a rank has, an interval of the whole dim for each piece."""
        found, start = [], 0
        for bounds in self.pieces:
            found.append((start + bounds[rank], start + bounds[rank + 1]))
            start += bounds[-1]
        return tuple(found)

    def size_of(self, rank: int) -> int:
        """How much of the dim a rank has."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.pieces)

    @property
    def leaves_none(self) -> bool:
        """Whether every rank has something of every piece."""
        return all(start < stop for bounds in self.pieces for start, stop in pairwise(bounds))

    def times(self, factor: int) -> Partition:
        """Of a dim each of whose entries has become `factor` entries after each other."""
        return Partition(tuple(tuple(b * factor for b in bounds) for bounds in self.pieces))

    def over(self, factor: int) -> Partition | None:
        """The inverse of `times`; None where a cut does not fit."""
        if any(bound % factor for bounds in self.pieces for bound in bounds):
            return None
        return Partition(tuple(tuple(b // factor for b in bounds) for bounds in self.pieces))

    def part(self, start: int, stop: int) -> Partition | None:
        """Of the dim from `start` to `stop`; None unless pieces begin and end there."""
        pieces, at = [], 0
        for bounds in self.pieces:
            if start <= at and at + bounds[-1] <= stop:
                pieces.append(bounds)
            at += bounds[-1]
        found = Partition(tuple(pieces)) if pieces else None
        return found if found is not None and found.size == stop - start else None


def joined(partitions: Sequence[Partition]) -> Partition:
    """Of dims that are put after each other."""
    return Partition(tuple(bounds for one in partitions for bounds in one.pieces))
