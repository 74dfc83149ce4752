"""Who sends what to whom: the intersection of the boxes owned with the boxes needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.parallel.layout import Box


class Piece(NamedTuple):
    """A part of the global image that goes to, or comes from, a peer."""

    peer: int
    box: Box


class Plan:
    """How one rank takes part in moving a tensor from the boxes owned to the boxes needed.

    Args:
        owned: per rank of the communicator the box it holds; boxes do not overlap.
        needed: per rank the box it wants; boxes may overlap, be empty, lie outside the image.
        rank: this rank.

    Attributes:
        sends: what goes to other ranks, in their order.
        receives: what comes from other ranks, in their order.
        kept: the part of the own box that the rank itself needs; may be empty.
    """

    def __init__(self, owned: Sequence[Box], needed: Sequence[Box], rank: int) -> None:
        self.owned = tuple(owned)
        self.needed = tuple(needed)
        self.rank = rank
        self.own = self.owned[rank]
        self.need = self.needed[rank]
        self.kept = self.own.intersect(self.need)
        self.sends = self._pieces(self.own, self.needed)
        self.receives = self._pieces(self.need, self.owned)

    def _pieces(self, mine: Box, theirs: Sequence[Box]) -> tuple[Piece, ...]:
        common = ((peer, mine.intersect(box)) for peer, box in enumerate(theirs))
        return tuple(Piece(p, box) for p, box in common if p != self.rank and not box.is_empty)

    @cached_property
    def nobodys(self) -> tuple[Box, ...]:
        """The parts of what is needed that no rank owns; may overlap with what some rank owns."""
        parts = [self.kept, *(piece.box for piece in self.receives)]
        parts = [box for box in parts if not box.is_empty]
        if not parts:
            return () if self.need.is_empty else (self.need,)
        around = Box(
            (min(start for start, _ in dim), max(stop for _, stop in dim))
            for dim in zip(*parts, strict=True)
        )
        full = sum(math.prod(box.shape) for box in parts) == math.prod(around.shape)
        return self.need.without(around) if full else (self.need,)

    @cached_property
    def unasked(self) -> tuple[Box, ...]:
        """The parts of the own box that the rank itself does not need."""
        return self.own.without(self.kept)

    @cached_property
    def links(self) -> npt.NDArray[np.bool_]:
        """Boolean (ranks, ranks): does row i send to column j? The same on every rank."""
        owned = np.asarray(self.owned, dtype=np.int64)
        needed = np.asarray(self.needed, dtype=np.int64)
        start = np.maximum(owned[:, None, :, 0], needed[None, :, :, 0])
        stop = np.minimum(owned[:, None, :, 1], needed[None, :, :, 1])
        links = np.asarray((stop > start).all(axis=2))
        np.fill_diagonal(links, False)
        return links

    @cached_property
    def talks(self) -> bool:
        """Whether any rank at all sends something: decided from the whole plan, alike on all."""
        return bool(self.links.any())

    @cached_property
    def graph(self) -> bytes:
        """A key that is the same for all plans with the same neighbours on all ranks."""
        return np.packbits(self.links).tobytes()

    def describe(self) -> str:
        """Short text for messages; the same on every rank."""
        return f"plan {hash((self.owned, self.needed)) & 0xFFFFFFFF:08x}"


@lru_cache(maxsize=4096)
def plan_for(owned: tuple[Box, ...], needed: tuple[Box, ...], rank: int) -> Plan:
    """The plan, computed once for each (boxes owned, boxes needed)."""
    return Plan(owned, needed, rank)


class MessageSizes(Plan):
    """One message to each of some peers and from each of others, of so many elements.

    Args:
        sends, receives: by peer the elements.
    """

    def __init__(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        self.sends, self.receives = (
            tuple(Piece(peer, self.box(count)) for peer, count in some.items())
            for some in (sends, receives)
        )

    @staticmethod
    def box(count: int) -> Box:
        """What a tensor (1, count) holds."""
        return Box(((0, 1), (0, count)))

    @cached_property
    def talks(self) -> bool:
        return True

    def describe(self) -> str:
        return f"messages to {len(self.sends)} ranks and from {len(self.receives)}"
