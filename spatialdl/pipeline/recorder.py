"""Runs a forward once and records its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from spatialdl.pipeline.python_state import AttributeKey, PythonState, form_of
from spatialdl.pipeline.steps import (
    IMAGE,
    Attribute,
    Recording,
    SharedStorage,
    Step,
    Value,
    is_reference,
    itself,
    without_unused,
)
from spatialdl.spatial.meta import on_meta
from spatialdl.spatial.random import keyed
from spatialdl.spatial.random.streams import numbers_drawn
from spatialdl.spatial.source_lines import replays, users_line
from spatialdl.torch_internals import (
    BatchNormBase,
    is_any_autocast_enabled,
    top_saved_tensors_hooks,
    tree_leaves,
    tree_map,
)

_NO_TENSOR = ("__set__", "__delete__", "backward", "register_hook")
"""Names of functions with a side effect that return no tensor."""


class CannotRecord(Exception):
    """A forward cannot be recorded; the message has the reason."""


@dataclass
class CallRecorder:
    """Runs a forward once and records its calls."""

    model: nn.Module
    whole: set[str]
    owners: list[str] = field(default_factory=lambda: [""])

    def __post_init__(self) -> None:
        self._paths = {id(module): path for path, module in self.model.named_modules()}
        self._blocks = {
            id(child)
            for module in self.model.modules()
            if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            for child in module.children()
        }
        self._attributes = {
            id(tensor): Attribute(path)
            for path, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]
        }
        self._values: dict[int, Value] = {}
        self._memory = SharedStorage()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._memory.note(tensor, -1)
        self._steps: list[Step] = []
        self._calls: Counter[str] = Counter()
        self.opened: set[str] = set()
        self._changed: set[Value] = set()
        self._written_state: set[str] = set()
        self._drawing: set[str] = set()
        self._loose = ""
        self._inside = False  # whether a step is running
        self._hooks = top_saved_tensors_hooks(False)
        self.state = PythonState(self.model)

    def lost(self, *, settled: bool) -> set[AttributeKey]:
        """Attributes whose changes a cut would lose.

        Args:
            settled: whether this is a repeated run; the first may initialize attributes.
        """
        state = self.state
        return state.lost | {
            key
            for key in state.between
            if settled or state.is_registered(key) or key.path not in {"", *self.opened}
        }

    def around(self, key: AttributeKey) -> str:
        """The smallest module that has an attribute, and whose inside is recorded.

        Raises:
            CannotRecord: if that is the whole network.
        """
        path = key.path
        while path and path not in self.opened:
            path = path.rpartition(".")[0]
        if not path:
            raise CannotRecord(
                f"its forward changes the attribute '{key}', which stages would treat as a "
                "constant; keep it in a separate module, or make it a buffer modified in place"
            )
        return path

    def record(self, image: Tensor) -> Recording:
        self._note(image, IMAGE)
        with torch.enable_grad(), on_meta(), keyed(0, 0), self._recorded_calls():
            result = self.model(image)
        self.state.finish()
        output = tree_map(self._as_value, result)
        if not any(isinstance(leaf, Value) for leaf in tree_leaves(output, is_leaf=is_reference)):
            raise CannotRecord("its forward returns no tensor")
        steps, last_use = without_unused(self._steps, output)
        return Recording(
            steps,
            output,
            written=frozenset(self._changed),
            drawing=frozenset(self._drawing),
            loose=self._loose,
            written_state=frozenset(self._written_state),
            joints=tuple(self._memory.joints(steps, last_use)),
        )

    @contextmanager
    def _recorded_calls(self) -> Iterator[None]:
        for module in self.model.modules():  # what `nn.Module.compile` sets is called instead
            module._compiled_call_impl = partial(self._module, module)
        try:
            with _Functions(self._function):
                yield
        finally:
            for module in self.model.modules():
                module._compiled_call_impl = None

    def _module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = self._paths[id(module)]
        call: Callable[..., Any] = module._call_impl
        if self._inside:
            return call(*args, **kwargs)
        if not self._is_whole(module, path):
            if module is self.model:
                return call(*args, **kwargs)
            self.opened.add(path)
            self.owners.append(path)
            result = call(*args, **kwargs)
            self.owners.pop()
            return result
        nth, self._calls[path] = self._calls[path], self._calls[path] + 1
        before = numbers_drawn()
        self.state.enter(path)
        result = self._step(path, lambda: call(*args, **kwargs), args, kwargs, nth)
        self.state.leave(path)
        if numbers_drawn() != before:
            self._drawing.add(path)
        return result

    def _is_whole(self, module: nn.Module, path: str) -> bool:
        hooks = (
            *(module._forward_pre_hooks, module._forward_hooks),
            *(module._backward_pre_hooks, module._backward_hooks),
        )
        if any(hooks) or path in self.whole:
            return True
        if type(module).forward is nn.Sequential.forward:
            return False
        if id(module) in self._blocks or isinstance(module, BatchNormBase):
            return True
        return type(module).__module__.startswith("torch.nn.")

    def _function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return function(*args, **kwargs)
        before = numbers_drawn()
        result = self._step(function, lambda: function(*args, **kwargs), args, kwargs)
        if numbers_drawn() != before:
            self._loose = self._steps[-1].name
        return result

    def _step(self, call: Any, run: Callable[[], Any], args: Any, kwargs: Any, nth: int = 0) -> Any:
        self._inside = True
        try:
            if self._memory.written():
                raise CannotRecord("its forward writes into a tensor by code outside of PyTorch")
            if top_saved_tensors_hooks(False) != self._hooks:
                raise CannotRecord("its forward calls a part under hooks, as a checkpoint does")
            own_args, own_kwargs = tree_map(self._as_value, (args, kwargs))
            result = run()
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            written = self._memory.written()
            if tensors or written or isinstance(call, str):
                number = len(self._steps)
                gives = tuple(Value(number, part) for part in range(len(tensors)))
                with_grad = torch.is_grad_enabled()
                owner = self.owners[-1]
                where = users_line()
                leaves = tree_leaves(result) if isinstance(call, str) else ()
                non_tensors = tuple(
                    form_of(leaf) for leaf in leaves if not isinstance(leaf, Tensor)
                )
                self._steps.append(
                    Step(
                        call, own_args, own_kwargs, gives, owner, nth, with_grad, non_tensors, where
                    )
                )
                operands = (
                    leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
                )
                self._memory.note_write(number, written, operands)
                self._note_all(tensors, gives, written)
            elif getattr(call, "__name__", "") in _NO_TENSOR:
                raise CannotRecord(
                    f"its forward calls '{resolve_name(call)}', which is not recorded; call it in "
                    "a separate module"
                )
            return result
        finally:
            self._inside = False

    def _note_all(
        self, tensors: Sequence[Tensor], gives: Sequence[Value], written: Sequence[Tensor]
    ) -> None:
        """Assign values to the outputs of a step, and new values to what it modified in place.

        Parameters and buffers are not renamed.
        """
        if is_any_autocast_enabled():
            raise CannotRecord("its forward enables autocast; do that inside of a block")
        returned = set(map(id, tensors))
        for tensor in written:
            if id(tensor) in self._attributes:
                self._written_state.add(self._attributes[id(tensor)].path)
                self._memory.note(tensor, -1)
            else:
                self._changed.add(self._values[id(tensor)])
        for tensor, value in zip(tensors, gives, strict=True):
            if id(tensor) not in self._attributes:
                self._note(tensor, value)
        for tensor in written:
            if id(tensor) not in returned and id(tensor) not in self._attributes:
                self._rename(tensor)

    def _rename(self, tensor: Tensor) -> None:
        old, new = self._as_value(tensor), Value(len(self._steps))
        self._steps.append(Step(itself, (old,), {}, (new,), self.owners[-1]))
        self._note(tensor, new)

    def _note(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._memory.note(tensor, value.step, value)

    def _as_value(self, operand: Any) -> Any:
        if isinstance(operand, nn.Module | FunctionType | MethodType | partial):
            raise CannotRecord("its forward passes a function or a module on, as a checkpoint does")
        if not isinstance(operand, Tensor):
            return operand
        reference = self._values.get(id(operand)) or self._attributes.get(id(operand))
        if reference is None:
            raise CannotRecord(
                f"its forward uses a tensor of shape {tuple(operand.shape)} of unknown origin (an "
                "attribute that is not a buffer, code outside of PyTorch); do that in a separate "
                "module"
            )
        if isinstance(operand.grad_fn, torch.autograd.function.BackwardCFunction):
            step = self._steps[reference.step] if isinstance(reference, Value) else None
            if step is not None and not (isinstance(step.call, str) and step.with_grad):
                self.owners.append(step.owner)  # which cannot be recorded
                raise CannotRecord(
                    "its forward calls a torch.autograd.Function, of which only the operations "
                    "inside are seen; do that in a separate module"
                )
        return reference


class _Functions(TorchFunctionMode):
    """Passes every call of a PyTorch function to a callback."""

    def __init__(self, record: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._record(func, args, kwargs or {})


replays(CallRecorder.record.__code__)
