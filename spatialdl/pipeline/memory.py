"""Tensors that share memory in a recorded forward, and the cuts that would separate them.

A stage receives copies. Where one of several tensors that share memory is written to, the others
must be in the same stage, or they would keep their old content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from spatialdl.pipeline.steps import Joint, Step, Value, itself


@dataclass
class _Member:
    """One of the tensors that share memory; kept alive, so that its id stays its own."""

    tensor: Tensor
    step: int
    lasting: bool
    version: int
    values: list[Value] = field(default_factory=list)


class _Write(NamedTuple):
    """Of which some tensors that share the memory may not know: what autograd saved changes."""

    step: int
    memory: int
    given: frozenset[int]
    hidden: bool


class SharedStorage:
    """The tensors of a recording by the memory that they share."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._sharing: dict[int, list[_Member]] = defaultdict(list)
        self._writes: list[_Write] = []

    def note(self, tensor: Tensor, step: int, value: Value | None = None) -> None:
        """Add a tensor, or what it is now.

        Args:
            step: that gives it.
            value: None for parameters and buffers, which outlast the forward.
        """
        member = self._members.get(id(tensor))
        if member is None:
            member = _Member(tensor, step, value is None, tensor._version)
            self._members[id(tensor)] = member
            self._sharing[_memory_of(tensor)].append(member)
        member.version = tensor._version
        if value is not None:
            member.values.append(value)

    def written(self) -> list[Tensor]:
        """The tensors into whose memory something was written since they were noted."""
        with torch._C.DisableTorchFunction():  # each of them would ask all modes
            bumped = [one for one in self._members.values() if one.tensor._version != one.version]
        memories = dict.fromkeys(_memory_of(one.tensor) for one in bumped)
        return [one.tensor for memory in memories for one in self._sharing[memory]]

    def note_write(self, step: int, written: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """A step wrote into memory.

        Args:
            written: the tensors that share it.
            given: the arguments of the step.
        """
        ids = frozenset(map(id, given))
        for memory in {_memory_of(tensor) for tensor in written}:
            hidden = any(one.tensor._version == one.version for one in self._sharing[memory])
            self._writes.append(_Write(step, memory, ids, hidden))

    def joints(self, steps: Sequence[Step], last_use: Mapping[Value, int]) -> list[Joint]:
        """The steps that must be in one stage because of what they write.

        Args:
            last_use: of each value that is used, the number of the last step that takes it.
        """
        found = []
        for number, step in enumerate(steps):
            if step.call is itself:  # or another stage would give what it was before the write
                writing = max(write.step for write in self._writes if write.step < number)
                found.append(_joint(steps, writing, number, writing))
        for write in self._writes:
            sharing = self._sharing[write.memory]
            before = [one for one in sharing if one.step < write.step]
            uses = {
                id(one): max((last_use.get(value, -1) for value in one.values), default=-1)
                for one in sharing
            }
            alive = [
                one
                for one in before
                if one.lasting or id(one.tensor) in write.given or uses[id(one)] > write.step
            ]
            if len(alive) > 1:
                made = sorted(one.step for one in before)
                first = made[0] if write.hidden and made[0] >= 0 else made[1]
                found.append(_joint(steps, first, write.step, write.step))
            if any(one.lasting for one in sharing):
                # the next micro-batch writes again, while a view would be on its way to others
                views = [one for one in sharing if not one.lasting and uses[id(one)] > one.step]
                last = len(steps) - 1
                found += [
                    _joint(steps, one.step, min(uses[id(one)], last), write.step) for one in views
                ]
        return found


def _joint(steps: Sequence[Step], first: int, last: int, write: int) -> Joint:
    where = f" ({steps[write].where})" if steps[write].where else ""
    names = f"'{steps[first].name}' and '{steps[last].name}'"
    return Joint(first, last, f"{names} share memory that is written to{where}")


def _memory_of(tensor: Tensor) -> int:
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse tensors have no storage of their own
        return id(tensor)
