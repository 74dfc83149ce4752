"""Which split tensors PyTorch would let share memory, and who must not be written to.

A view of a split tensor is a tensor of its own, which autograd does not know to be a view; where
pixels have moved to another rank, it does not even lie in the same memory.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spatialdl.spatial.table import SplitOperand, refusal


class SplitMember(SplitOperand, Protocol):
    """What is looked at here of a `SpatialTensor`, which stands above."""

    _tile: Tensor
    _family: Family
    _apart: bool

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows what is done to it."""


class Family:
    """A split tensor and its views."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[SplitMember]] = []
        self.lines: list[_Line] = []

    @property
    def members(self) -> list[SplitMember]:
        """Those that are alive; none as long as there is no view."""
        return [member for ref in self._members if (member := ref()) is not None]

    def add(self, view: SplitMember, owner: SplitMember) -> None:
        members = [*(self.members or [owner]), view]
        self._members = [weakref.ref(member) for member in members]

    def watched(self, line: Tensor) -> Tensor:
        """`line`, a plain copy of a part of a member, of which PyTorch would make a view."""
        if line.is_inference():  # such tensors do not count how often they are written to
            with torch.inference_mode(False):
                line = line.clone()
        self.lines.append(_Line(line))
        return line


class _Line:
    """Knows whether a tensor was written to, and whether somebody still has it or a view of it."""

    def __init__(self, line: Tensor) -> None:
        self._witness = line.detach()
        self._version = self._witness._version
        self._storage = StorageWeakRef(line.untyped_storage())  # type: ignore[no-untyped-call]
        self._witness.data = line.new_empty(0)  # goes on counting, but keeps no memory

    @property
    def was_written(self) -> bool:
        return self._witness._version != self._version

    @property
    def is_held(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]


_owners: weakref.WeakValueDictionary[int, SplitMember] = weakref.WeakValueDictionary()
"""Whose tile was taken out, by where it lies in memory."""


def lend(x: SplitMember) -> None:
    """Note that the tile of `x` is taken out, to see whether what is put back is a view of it."""
    _owners[x._tile.untyped_storage()._cdata] = x


def note_view(x: SplitMember) -> None:
    """Note that `x` is a view, if it lies in the memory of a tile that was lent."""
    place = x._tile.untyped_storage()._cdata
    owner = _owners.get(place)
    if owner is not None and owner._tile.untyped_storage()._cdata == place:
        share(owner, x)


def share(owner: SplitMember, view: SplitMember, moved: bool = False) -> None:
    """Note that PyTorch would make `view` a view of `owner`.

    Args:
        moved: whether its pixels have moved between ranks.
    """
    owner._family.add(view, owner)
    view._family = owner._family
    view._apart = owner._apart or moved


def check_write(function: Any, target: SplitMember) -> None:
    """A view and its base share memory, but autograd does not know it: a wrong gradient.

    Where pixels have moved they do not even share it: then never.
    """
    check_lines(target)
    members = target._family.members
    if any(line.is_held for line in target._family.lines):
        raise refusal(
            function,
            [target],
            "it would not change the rows or columns that were selected from it and are still "
            "held; clone() it first",
        )
    apart = target._apart or any(member._apart for member in members)
    if not apart and not torch.is_grad_enabled() and not target.requires_grad:
        return
    if any(member is not target for member in members):
        raise refusal(
            function,
            [target],
            "it would write into another split tensor too, of which this one is a view; "
            "clone() it first",
        )


def check_lines(x: SplitMember) -> None:
    """Refuse to read an image of which a selected row or column was written to: it is a copy."""
    if x._family.lines and any(line.was_written for line in x._family.lines):
        raise refusal(
            Tensor.__getitem__,
            [x],
            "a row or column selected from it was written to in place, which cannot reach the "
            "image; clone() it first, or write with torch.where",
        )
