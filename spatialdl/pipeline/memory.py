"""Tensors that share memory in a recorded forward, and the cuts that would separate them.

A stage receives copies. Tensors that share memory with one that is written to must be in the same
stage, or they would keep their old content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from spatialdl.pipeline.steps import Joint, Step, Value, itself
from spatialdl.torch_internals import DisableTorchFunction


@dataclass
class _Member:
    """A tensor that shares memory; kept alive, so that its id stays unique."""

    tensor: Tensor
    step: int
    lasting: bool
    version: int
    values: list[Value] = field(default_factory=list)


class _Write(NamedTuple):
    """A write to shared memory; hidden if a version counter missed it, so autograd cannot tell."""

    step: int
    memory: int
    arguments: frozenset[int]
    hidden: bool


class SharedStorage:
    """The tensors of a recording by the memory that they share."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._sharing: dict[int, list[_Member]] = defaultdict(list)
        self._writes: list[_Write] = []

    def note(self, tensor: Tensor, step: int, value: Value | None = None) -> None:
        """Add a tensor, or update its entry.

        Args:
            step: that returns it.
            value: None for parameters and buffers, which outlive the forward.
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
        """Tensors whose memory was written to since they were noted."""
        with DisableTorchFunction():  # function modes would run for each tensor
            bumped = [
                member
                for member in self._members.values()
                if member.tensor._version != member.version
            ]
        storages = dict.fromkeys(_memory_of(member.tensor) for member in bumped)
        return [member.tensor for storage in storages for member in self._sharing[storage]]

    def note_write(self, step: int, written: Iterable[Tensor], arguments: Iterable[Tensor]) -> None:
        """Record a write to memory by a step.

        Args:
            written: the tensors that share the memory.
            arguments: of the step.
        """
        ids = frozenset(map(id, arguments))
        for memory in {_memory_of(tensor) for tensor in written}:
            hidden = any(
                member.tensor._version == member.version for member in self._sharing[memory]
            )
            self._writes.append(_Write(step, memory, ids, hidden))

    def joints(self, steps: Sequence[Step], last_use: Mapping[Value, int]) -> list[Joint]:
        """Find steps that must be in the same stage because of their writes.

        Args:
            last_use: number of the last step that takes a value, for each value that is used.
        """
        joints = []
        for number, step in enumerate(steps):
            if step.call is itself:  # in another stage it would return the value before the write
                writing = max(write.step for write in self._writes if write.step < number)
                joints.append(_joint(steps, writing, number, writing))
        for write in self._writes:
            sharing = self._sharing[write.memory]
            before = [member for member in sharing if member.step < write.step]
            uses = {
                id(member): max((last_use.get(value, -1) for value in member.values), default=-1)
                for member in sharing
            }
            alive = [
                member
                for member in before
                if member.lasting
                or id(member.tensor) in write.arguments
                or uses[id(member)] > write.step
            ]
            if len(alive) > 1:
                made = sorted(member.step for member in before)
                first = made[0] if write.hidden and made[0] >= 0 else made[1]
                joints.append(_joint(steps, first, write.step, write.step))
            if any(member.lasting for member in sharing):
                # the next micro-batch writes again while a view may still be in flight
                views = [
                    member
                    for member in sharing
                    if not member.lasting and uses[id(member)] > member.step
                ]
                last = len(steps) - 1
                joints += [
                    _joint(steps, member.step, min(uses[id(member)], last), write.step)
                    for member in views
                ]
        return joints


def _joint(steps: Sequence[Step], first: int, last: int, write: int) -> Joint:
    where = f" ({steps[write].where})" if steps[write].where else ""
    names = f"'{steps[first].name}' and '{steps[last].name}'"
    return Joint(first, last, f"{names} share memory that is written to{where}")


def _memory_of(tensor: Tensor) -> int:
    try:
        with DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse tensors have no storage of their own
        return id(tensor)
