"""What a network does, as a list of calls: data that can be cut, run and counted.

See `pipeline.recording` for where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from spatialdl.pipeline.outer_state import form_of
from spatialdl.pipeline.source_lines import replays


class Value(NamedTuple):
    """A tensor on its way through the network: the how-manieth of which step."""

    step: int
    part: int = 0


IMAGE = Value(-1)


class Attribute(NamedTuple):
    """A parameter or buffer that is used outside of its module."""

    path: str


@dataclass(frozen=True)
class Step:
    """One call in the forward of a network.

    Attributes:
        call: path of a module, or a function.
        args, kwargs: of the call, with `Value` and `Attribute` in the places of tensors.
        gives: the tensors in what it returns, in order.
        takes: the tensors that it is given.
        attributes: paths of parameters and buffers that it is given.
        owner: path of the module whose forward makes the call.
        nth: how often the module has been called before.
        with_grad: whether it is differentiated.
        others: forms of what a module returns beside tensors, see `deep_state`.
        where: ``file:line`` of the call in the network's source.
    """

    call: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: tuple[Value, ...]
    owner: str
    nth: int = 0
    with_grad: bool = True
    others: tuple[Any, ...] = ()
    where: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """For messages."""
        if isinstance(self.call, str):
            return self.call
        kind = getattr(self.call, "__self__", None)
        if isinstance(kind, type):
            return kind.__name__  # an autograd.Function
        return (resolve_name(self.call) or str(self.call)).rpartition(".")[2]

    @property
    def path(self) -> str:
        """Where in the network it is."""
        return self.call if isinstance(self.call, str) else self.owner

    def __deepcopy__(self, memo: object) -> Step:
        return self

    @cached_property
    def takes(self) -> tuple[Value, ...]:
        return tuple(one for one in self._references if isinstance(one, Value))

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        return tuple(one.path for one in self._references if isinstance(one, Attribute))

    @cached_property
    def _references(self) -> tuple[Value | Attribute, ...]:
        operands = tree_leaves((self.args, self.kwargs), is_leaf=is_reference)
        return tuple(one for one in operands if is_reference(one))

    @cached_property
    def constants(self) -> Any:
        """What it is given and returns beside tensors."""
        return form_of((self.args, self.kwargs)), self.others

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be alike for every number of samples, in training and in evaluation."""
        return self.call, self._references, self.gives, self.owner, self.with_grad


def itself(x: Tensor) -> Tensor:
    """What was written in place, as a new value, also for another stage."""
    return x


def _nothing() -> None:
    """In the place of a step that is not needed, so that the others keep their numbers."""


def without_unused(steps: Sequence[Step], output: Any) -> tuple[tuple[Step, ...], dict[Value, int]]:
    """The steps without new names of values that no step takes, which need not pass to others.

    Args:
        output: of the network, with its values.

    Returns:
        As many steps, and for each value that is used the number of the last step that takes it;
        that of the output is behind all steps.
    """
    leaves = tree_leaves(output, is_leaf=is_reference)
    last_use = {one: len(steps) for one in leaves if isinstance(one, Value)}
    found: list[Step] = []
    for number in reversed(range(len(steps))):
        step = steps[number]
        if step.call is itself and step.gives[0] not in last_use:
            step = Step(_nothing, (), {}, (), step.owner)
        for value in step.takes:
            last_use.setdefault(value, number)
        found.append(step)
    return tuple(reversed(found)), last_use


def is_reference(one: object) -> bool:
    return isinstance(one, Value | Attribute)


class Joint(NamedTuple):
    """Two steps that must be in one stage.

    Attributes:
        first, last: their numbers.
        reason: that they have in common, for messages.
    """

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Recording:
    """What a forward calls, in order.

    Attributes:
        output: what the network returns, with `Value` in the places of tensors.
        sizes: elements of each value.
        written: values that are written into once they are there.
        written_state: paths of parameters and buffers that the forward writes into.
        joints: steps that must be in one stage, as they share memory.
        drawing: paths of modules that draw random numbers.
        loose: a function outside of these that draws some; empty if there is none.
    """

    steps: tuple[Step, ...]
    output: Any
    sizes: dict[Value, int]
    written: frozenset[Value]
    drawing: frozenset[str]
    loose: str
    written_state: frozenset[str] = frozenset()
    joints: tuple[Joint, ...] = ()


def run_step(
    step: Step, module_of: nn.Module, values: dict[Value, Tensor], device: torch.device
) -> Any:
    """Carry out a step; what it gives is added to `values`.

    Args:
        module_of: has modules, parameters and buffers under their paths.
        device: on which tensors are made that the network makes without others.

    Returns:
        What the call returned.
    """

    def filled(one: Any) -> Any:
        if isinstance(one, Value):
            return values[one]
        if isinstance(one, Attribute):
            holder, _, name = one.path.rpartition(".")
            return getattr(module_of.get_submodule(holder), name)
        is_meta = isinstance(one, torch.device) and one.type == "meta"
        return device if is_meta else one

    args, kwargs = tree_map(filled, (step.args, step.kwargs), is_leaf=is_reference)
    call = module_of.get_submodule(step.call) if isinstance(step.call, str) else step.call
    with torch.set_grad_enabled(torch.is_grad_enabled() and step.with_grad):
        result = call(*args, **kwargs)
    leaves = tree_leaves(result)
    given = (one for one in leaves if isinstance(one, Tensor))
    if step.others:
        others = tuple(form_of(one) for one in leaves if not isinstance(one, Tensor))
        if others != step.others:
            raise ValueError(
                f"'{step.name}' returns other numbers beside its tensors than when it was "
                "recorded, which other stages cannot know: let it return tensors, or leave the "
                "network uncut (parallel=sp or dp)"
            )
    values.update(zip(step.gives, given, strict=True))
    return result


def output_of(recording: Recording, values: dict[Value, Tensor]) -> Any:
    """What the network returns."""
    return tree_map(
        lambda one: values[one] if isinstance(one, Value) else one,
        recording.output,
        is_leaf=is_reference,
    )


replays(run_step.__code__, "step")
