"""The forward of a network as a list of calls that can be cut, run and counted.

`pipeline.recording` makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from spatialdl.pipeline.python_state import form_of
from spatialdl.spatial.source_lines import replays
from spatialdl.torch_internals import DisableTorchFunction, tree_leaves, tree_map


class Value(NamedTuple):
    """A tensor in the forward: step number and output index."""

    step: int
    part: int = 0


IMAGE = Value(-1)


class Attribute(NamedTuple):
    """A parameter or buffer used outside of its module."""

    path: str


@dataclass(frozen=True)
class Step:
    """One call in the forward of a network.

    Attributes:
        call: path of a module, or a function.
        args, kwargs: of the call, with `Value` and `Attribute` in place of tensors.
        gives: output tensors, in order.
        takes: input tensors.
        attributes: paths of parameters and buffers among the arguments.
        owner: path of the module whose forward makes the call.
        nth: number of earlier calls of the module.
        with_grad: whether it is differentiated.
        non_tensors: forms of a module's non-tensor outputs, see `python_state.form_of`.
        where: ``file:line`` of the call in the network's source.
    """

    call: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: tuple[Value, ...]
    owner: str
    nth: int = 0
    with_grad: bool = True
    non_tensors: tuple[Any, ...] = ()
    where: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Name for messages."""
        if isinstance(self.call, str):
            return self.call
        return (resolve_name(self.call) or str(self.call)).rpartition(".")[2]

    @property
    def path(self) -> str:
        """Path of the module that is called, or that makes the call."""
        return self.call if isinstance(self.call, str) else self.owner

    def __deepcopy__(self, memo: object) -> Step:
        return self

    @cached_property
    def takes(self) -> tuple[Value, ...]:
        return tuple(reference for reference in self._references if isinstance(reference, Value))

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        return tuple(
            reference.path for reference in self._references if isinstance(reference, Attribute)
        )

    @cached_property
    def _references(self) -> tuple[Value | Attribute, ...]:
        operands = tree_leaves((self.args, self.kwargs), is_leaf=is_reference)
        return tuple(reference for reference in operands if is_reference(reference))

    @cached_property
    def constants(self) -> Any:
        """Forms of the non-tensor arguments and outputs."""
        return form_of((self.args, self.kwargs)), self.non_tensors

    @property
    def form(self) -> tuple[Any, ...]:
        """The part that must not depend on the number of samples or the mode."""
        return self.call, self._references, self.gives, self.owner, self.with_grad


def itself(x: Tensor) -> Tensor:
    """A tensor after a write in place, as a new value that may pass to another stage."""
    return x


def _nothing() -> None:
    """Placeholder of a dropped step, so that step numbers do not change."""


def without_unused(steps: Sequence[Step], output: Any) -> tuple[tuple[Step, ...], dict[Value, int]]:
    """Drop renamings of values that no later step takes, so that they need not pass borders.

    Args:
        output: of the network, with its values.

    Returns:
        As many steps, and for each used value the number of the last step that takes it; the
        output counts as a step after all.
    """
    leaves = tree_leaves(output, is_leaf=is_reference)
    last_use = {leaf: len(steps) for leaf in leaves if isinstance(leaf, Value)}
    kept: list[Step] = []
    for number in reversed(range(len(steps))):
        step = steps[number]
        if step.call is itself and step.gives[0] not in last_use:
            step = Step(_nothing, (), {}, (), step.owner)
        for value in step.takes:
            last_use.setdefault(value, number)
        kept.append(step)
    return tuple(reversed(kept)), last_use


def is_reference(one: object) -> bool:
    return isinstance(one, Value | Attribute)


class Joint(NamedTuple):
    """Two steps that must be in the same stage.

    Attributes:
        first, last: step numbers.
        reason: why, for messages.
    """

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Recording:
    """The calls of a forward, in order.

    Attributes:
        output: return value of the network, with `Value` in place of tensors.
        written: values modified in place after their step.
        written_state: paths of parameters and buffers that the forward modifies.
        joints: steps that must be in the same stage because they share memory.
        drawing: paths of modules that draw random numbers.
        loose: a function outside of these that draws random numbers; empty if none.
    """

    steps: tuple[Step, ...]
    output: Any
    written: frozenset[Value]
    drawing: frozenset[str]
    loose: str
    written_state: frozenset[str] = frozenset()
    joints: tuple[Joint, ...] = ()


def run_step(
    step: Step, module_of: nn.Module, values: dict[Value, Tensor], device: torch.device
) -> Any:
    """Run a step and add its outputs to `values`.

    Args:
        module_of: holds modules, parameters and buffers under their paths.
        device: of tensors that the network creates from no other tensor.

    Returns:
        The result of the call.
    """

    def filled(operand: Any) -> Any:
        if isinstance(operand, Value):
            return values[operand]
        if isinstance(operand, Attribute):
            holder, _, name = operand.path.rpartition(".")
            return getattr(module_of.get_submodule(holder), name)
        is_meta = isinstance(operand, torch.device) and operand.type == "meta"
        return device if is_meta else operand

    args, kwargs = tree_map(filled, (step.args, step.kwargs), is_leaf=is_reference)
    call = module_of.get_submodule(step.call) if isinstance(step.call, str) else step.call
    with torch.set_grad_enabled(torch.is_grad_enabled() and step.with_grad):
        result = call(*args, **kwargs)
    leaves = tree_leaves(result)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    if step.non_tensors:
        non_tensors = tuple(form_of(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        if non_tensors != step.non_tensors:
            raise ValueError(
                f"'{step.name}' returns different non-tensor values than when it was recorded, "
                "and stages cannot exchange them: let it return tensors, or leave the network "
                "uncut (parallel=sp or dp)"
            )
    values.update(zip(step.gives, tensors, strict=True))
    return result


def output_of(recording: Recording, values: dict[Value, Tensor]) -> Any:
    """Fill the network's output structure with tensors."""
    return tree_map(
        lambda leaf: values[leaf] if isinstance(leaf, Value) else leaf,
        recording.output,
        is_leaf=is_reference,
    )


replays(run_step.__code__, "step")


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
