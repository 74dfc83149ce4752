"""Communication plans: intersections of the boxes owned with the boxes needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.layout.layout import Box


class Piece(NamedTuple):
    """A part of the global image that is sent to, or received from, a peer."""

    peer: int
    box: Box


class Plan:
    """One rank's part in moving a tensor from the boxes owned to the boxes needed.

    Args:
        owned: box that each rank of the communicator holds; boxes do not overlap.
        needed: box that each rank needs; boxes may overlap, be empty, or exceed the image.
        rank: this rank.

    Attributes:
        sends: pieces sent to other ranks, in rank order.
        receives: pieces received from other ranks, in rank order.
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
    def unowned(self) -> tuple[Box, ...]:
        """Parts of the needed box that no rank owns; may overlap with owned parts."""
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
    def unneeded(self) -> tuple[Box, ...]:
        """Parts of the own box that the rank itself does not need."""
        return self.own.without(self.kept)

    @cached_property
    def links(self) -> npt.NDArray[np.bool_]:
        """Boolean (ranks, ranks): whether row i sends to column j; the same on every rank."""
        owned = np.asarray(self.owned, dtype=np.int64)
        needed = np.asarray(self.needed, dtype=np.int64)
        start = np.maximum(owned[:, None, :, 0], needed[None, :, :, 0])
        stop = np.minimum(owned[:, None, :, 1], needed[None, :, :, 1])
        links = np.asarray((stop > start).all(axis=2))
        np.fill_diagonal(links, False)
        return links

    @cached_property
    def communicates(self) -> bool:
        """Whether any rank sends; computed from the whole plan, the same on every rank."""
        return bool(self.links.any())

    @cached_property
    def graph(self) -> bytes:
        """Key shared by all plans with the same neighbours on all ranks."""
        return np.packbits(self.links).tobytes()

    def describe(self) -> str:
        """Short description for messages; the same on every rank."""
        return f"plan {hash((self.owned, self.needed)) & 0xFFFFFFFF:08x}"


@lru_cache(maxsize=4096)
def plan_for(owned: tuple[Box, ...], needed: tuple[Box, ...], rank: int) -> Plan:
    """Plan for (boxes owned, boxes needed), cached."""
    return Plan(owned, needed, rank)


class MessageSizes(Plan):
    """Messages by number of elements, independent of an image.

    Args:
        sends, receives: number of elements by peer.
    """

    def __init__(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        self.sends, self.receives = (
            tuple(Piece(peer, self.box(count)) for peer, count in some.items())
            for some in (sends, receives)
        )

    @staticmethod
    def box(count: int) -> Box:
        """Box of a tensor (1, count)."""
        return Box(((0, 1), (0, count)))

    @cached_property
    def communicates(self) -> bool:
        return True

    def describe(self) -> str:
        return f"messages to {len(self.sends)} ranks and from {len(self.receives)}"
