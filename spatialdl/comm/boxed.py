"""Tensors with their boxes of the global image, and exchanges of their parts along a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.plan import Piece, Plan
from spatialdl.layout.layout import Box


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
    """Pieces that this rank sends, and pieces that it receives."""
    return (plan.receives, plan.sends) if adjoint else (plan.sends, plan.receives)


class Route(NamedTuple):
    """Destination of a plan's messages if ranks start them at different times.

    Attributes:
        ranks: communicator ranks, in the order of the plan; may contain one twice.
        tag: distinguishes them from other messages between the same ranks.
    """

    ranks: Sequence[int]
    tag: int


class Exchange(NamedTuple):
    """Tensors that one rank moves along a plan.

    Attributes:
        sends: tensors that hold ``plan.sends`` (``plan.receives`` if `adjoint`); if several hold a
            piece, the first is used.
        receives: tensors that hold ``plan.receives`` (``plan.sends`` if `adjoint`).
        device: of the tensors; on ``meta`` nothing is moved.
        adjoint: whether the plan is reversed.
        route: None if all ranks of the communicator start the exchange together.
        name: operation name, for messages.
    """

    plan: Plan
    sends: Sequence[BoxedTensor]
    receives: Sequence[BoxedTensor]
    device: torch.device
    adjoint: bool = False
    route: Route | None = None
    name: str = "repartition"

    @property
    def outgoing(self) -> tuple[Piece, ...]:
        return pieces_of(self.plan, self.adjoint)[0]

    @property
    def incoming(self) -> tuple[Piece, ...]:
        return pieces_of(self.plan, self.adjoint)[1]

    def leaving(self) -> list[Tensor]:
        """Views of the sent pieces."""
        return views_of(self.outgoing, self.sends)

    def landing(self) -> list[Tensor]:
        """Views of the received pieces, filled by the exchange."""
        return views_of(self.incoming, self.receives)


def views_of(pieces: tuple[Piece, ...], tensors: Sequence[BoxedTensor]) -> list[Tensor]:
    """A view for each piece, into the first tensor that holds it."""
    places = owners_of(pieces, tuple(boxed.box for boxed in tensors))
    return [tensors[place].view(piece.box) for place, piece in zip(places, pieces, strict=True)]


@lru_cache(maxsize=4096)
def owners_of(pieces: tuple[Piece, ...], boxes: tuple[Box, ...]) -> tuple[int, ...]:
    """Index of the first box that contains each piece.

    Boxes equal to the pieces match one to one: pieces from two ranks may have the same pixels.
    """
    if boxes == tuple(piece.box for piece in pieces):
        return tuple(range(len(pieces)))
    owners = []
    for piece in pieces:
        inside = [i for i, box in enumerate(boxes) if box.intersect(piece.box) == piece.box]
        if not inside:
            raise RuntimeError(f"no tensor holds {piece.box}, boxes are {boxes}")
        owners.append(inside[0])
    return tuple(owners)
