"""Tracks views of split tensors, and refuses writes to tensors with views.

Autograd does not know that a view of a split tensor is a view. If pixels were moved to another
rank, the view does not even share memory with its base.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spatialdl.spatial.table import SplitOperand, refusal


class SplitMember(SplitOperand, Protocol):
    """The interface of `SpatialTensor` used here, as `tensor` imports this module."""

    _tile: Tensor
    _family: Family
    _apart: bool

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on it."""


class Family:
    """A split tensor and its views."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[SplitMember]] = []
        self.lines: list[_Line] = []

    @property
    def members(self) -> list[SplitMember]:
        """The living members; empty if there was never a view."""
        return [member for ref in self._members if (member := ref()) is not None]

    def add(self, view: SplitMember, owner: SplitMember) -> None:
        members = [*(self.members or [owner]), view]
        self._members = [weakref.ref(member) for member in members]

    def track_line(self, line: Tensor) -> Tensor:
        """Track writes to `line`, a plain copy that would be a view in PyTorch."""
        if line.is_inference():  # inference tensors have no version counter
            with torch.inference_mode(False):
                line = line.clone()
        self.lines.append(_Line(line))
        return line


class _Line:
    """Tracks whether a tensor was modified, and whether it or a view of it still exists."""

    def __init__(self, line: Tensor) -> None:
        self._witness = line.detach()
        self._version = self._witness._version
        self._storage = StorageWeakRef(line.untyped_storage())  # type: ignore[no-untyped-call]
        self._witness.data = line.new_empty(0)  # shares the version counter without memory

    @property
    def was_written(self) -> bool:
        return self._witness._version != self._version

    @property
    def is_held(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]


_owners: weakref.WeakValueDictionary[int, SplitMember] = weakref.WeakValueDictionary()
"""The owners of tiles passed to operations, by storage."""


def note_tile(x: SplitMember) -> None:
    """Record the tile of `x` as an operation's input, to detect results that are views of it."""
    _owners[x._tile.untyped_storage()._cdata] = x


def note_view(x: SplitMember) -> None:
    """Record `x` as a view if it shares memory with a recorded tile."""
    place = x._tile.untyped_storage()._cdata
    owner = _owners.get(place)
    if owner is not None and owner._tile.untyped_storage()._cdata == place:
        share(owner, x)


def share(owner: SplitMember, view: SplitMember, moved: bool = False) -> None:
    """Record `view` as a view of `owner`, which it would be in PyTorch.

    Args:
        moved: whether pixels were moved between ranks.
    """
    owner._family.add(view, owner)
    view._family = owner._family
    view._apart = owner._apart or moved


def check_write(function: Any, target: SplitMember) -> None:
    """Refuse writes that would reach, or miss, another split tensor.

    A view and its base share memory unknown to autograd, so gradients would be wrong. If pixels
    were moved they do not share memory, so writes are refused without gradients too.
    """
    check_lines(target)
    members = target._family.members
    if any(line.is_held for line in target._family.lines):
        raise refusal(
            function,
            [target],
            "it would not change rows or columns that were selected from it and are still in "
            "use; clone() it first",
        )
    apart = target._apart or any(member._apart for member in members)
    if not apart and not torch.is_grad_enabled() and not target.requires_grad:
        return
    if any(member is not target for member in members):
        raise refusal(
            function,
            [target],
            "it would also modify another split tensor, its base or a view of it; clone() it first",
        )


def check_lines(x: SplitMember) -> None:
    """Refuse an image if a row or column selected from it, which is a copy, was modified."""
    if x._family.lines and any(line.was_written for line in x._family.lines):
        raise refusal(
            Tensor.__getitem__,
            [x],
            "a row or column selected from it was modified in place, which does not change the "
            "image; clone() it first, or use torch.where",
        )
