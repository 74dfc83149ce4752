"""Tensors, the boxes of the global image that they hold, and what of them moves along a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.plan import Piece, Plan
from spatialdl.parallel.layout import Box


class BoxedTensor(NamedTuple):
    """A tensor (N, ..., *spatial) that holds a box of the global image."""

    tensor: Tensor
    box: Box

    def view(self, box: Box) -> Tensor:
        """The part of the tensor that lies in `box`."""
        batch, *spatial = box.slices_in(self.box)
        part: tuple[Any, ...] = (batch, ..., *spatial)
        return self.tensor[part]


def pieces_of(plan: Plan, adjoint: bool) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """What this rank sends, and what it receives."""
    return (plan.receives, plan.sends) if adjoint else (plan.sends, plan.receives)


class Route(NamedTuple):
    """Where the messages of a plan go if ranks come to them at different times.

    Attributes:
        ranks: of the communicator, in the order of the plan; one may be there twice.
        tag: tells them apart from other messages between the same ranks.
    """

    ranks: Sequence[int]
    tag: int


class Exchange(NamedTuple):
    """What one rank moves along a plan.

    Attributes:
        sends: tensors that hold ``plan.sends`` (``plan.receives`` if `adjoint`); of several that
            hold a piece the first counts.
        receives: tensors that hold ``plan.receives`` (``plan.sends`` if `adjoint`).
        device: where the tensors lie; on ``meta`` nothing is moved.
        adjoint: the plan backwards.
        route: None if all ranks of the communicator come to it together.
    """

    plan: Plan
    sends: Sequence[BoxedTensor]
    receives: Sequence[BoxedTensor]
    device: torch.device
    adjoint: bool = False
    route: Route | None = None

    @property
    def outgoing(self) -> tuple[Piece, ...]:
        return pieces_of(self.plan, self.adjoint)[0]

    @property
    def incoming(self) -> tuple[Piece, ...]:
        return pieces_of(self.plan, self.adjoint)[1]

    def leaving(self) -> list[Tensor]:
        """Views of what this rank sends."""
        return views_of(self.outgoing, self.sends)

    def landing(self) -> list[Tensor]:
        """Views that are filled with what it receives."""
        return views_of(self.incoming, self.receives)


def views_of(pieces: tuple[Piece, ...], held: Sequence[BoxedTensor]) -> list[Tensor]:
    """A view for each piece, of the first tensor that holds it."""
    places = owners_of(pieces, tuple(each.box for each in held))
    return [held[place].view(piece.box) for place, piece in zip(places, pieces, strict=True)]


@lru_cache(maxsize=4096)
def owners_of(pieces: tuple[Piece, ...], boxes: tuple[Box, ...]) -> tuple[int, ...]:
    """For each piece the index of the first box that contains it.

    A box for each piece is that piece's own: what comes from two ranks may be the same pixels.
    """
    if boxes == tuple(piece.box for piece in pieces):
        return tuple(range(len(pieces)))
    found = []
    for piece in pieces:
        inside = [i for i, box in enumerate(boxes) if box.intersect(piece.box) == piece.box]
        if not inside:
            raise RuntimeError(f"no tensor holds {piece.box}, only {boxes}")
        found.append(inside[0])
    return tuple(found)
