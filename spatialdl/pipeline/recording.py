"""The forward of a network as a list of steps, found by running it once without data.

A network is run on the ``meta`` device, where tensors have shapes but no memory. What it calls, its
modules and the functions between them, is written down: so ordinary Python, with loops and sizes
that decide, becomes a list that can be cut anywhere. Sizes are part of what is written down, so
each number of samples has a recording of its own.

What is kept whole: modules of ``torch.nn``; blocks, which are the elements of a ``nn.Sequential``,
``nn.ModuleList`` or ``nn.ModuleDict``; modules with hooks; and those whose forward cannot be
written down.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spatialdl.pipeline.steps import IMAGE, Attribute, Recording, Step, Value, is_reference
from spatialdl.random import keyed
from spatialdl.random.streams import numbers_drawn
from spatialdl.source_lines import replays, users_line


class CannotRecord(Exception):
    """Why a forward cannot be written down."""


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without memory, to find out shapes and costs; in evaluation, which takes any batch."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    shadow = copy.deepcopy(model, memo).eval()
    for layer in shadow.modules():
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            layer.momentum = 0.1  # a cumulative average would read a counter that has no value
    return shadow


def switch_to(shadow: nn.Module, training: bool) -> None:
    """Training or evaluation, but for BatchNorm, which in training refuses a single value."""
    shadow.train(training)
    for layer in shadow.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


class Forward:
    """The forward of a network, recorded for any number of samples.

    Args:
        model: stays as it is; a copy without memory is run.
        image_size: (channels, H, W).
    """

    def __init__(self, model: nn.Module, image_size: tuple[int, ...]) -> None:
        self._shadow, self._image_size = meta_copy(model), image_size
        self._dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        self._whole: set[str] = set()  # paths of modules whose forward cannot be written down
        self._found: dict[tuple[int, bool], Recording] = {}

    def __deepcopy__(self, memo: object) -> Forward:
        return self

    def of(self, samples: int, training: bool) -> Recording:
        """What the network does with so many samples.

        Raises:
            CannotRecord: with the reason; also if it is not the same for other numbers of samples.
        """
        key = samples, training
        if key not in self._found:
            recording = self._record(samples, training)
            first = next(iter(self._found.values()), recording)
            _check_form(first, recording, samples, training)
            self._found[key] = recording
        return self._found[key]

    def _record(self, samples: int, training: bool) -> Recording:
        switch_to(self._shadow, training)
        image = torch.empty(samples, *self._image_size, dtype=self._dtype, device="meta")
        while True:
            recorder = _Recorder(self._shadow, self._whole)
            try:
                return recorder.record(image)
            except Exception as error:
                where = recorder.owners[-1]
                if where == "":
                    raise CannotRecord(str(error)) from error
                self._whole.add(where)  # it may be called as it is


def _check_form(first: Recording, other: Recording, samples: int, training: bool) -> None:
    for one, two in zip(first.steps, other.steps, strict=False):
        if one.form != two.form:
            break
    else:
        if len(first.steps) == len(other.steps) and first.output == other.output:
            return
        one = two = (first.steps or other.steps)[-1]
    raise CannotRecord(
        f"for {samples} samples in {'training' if training else 'evaluation'} its forward goes "
        f"another way than before, at '{two.name}' instead of '{one.name}'"
    )


@dataclass
class _Recorder:
    """Runs a forward once and writes down what it calls."""

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
        self._seen: list[tuple[Tensor, int]] = []  # kept alive: an id must not come again
        self._steps: list[Step] = []
        self._calls: Counter[str] = Counter()
        self._sizes: dict[Value, int] = {}
        self._changed: set[Value] = set()
        self._drawing: set[str] = set()
        self._loose = ""
        self._inside = False  # of what is kept whole

    def record(self, image: Tensor) -> Recording:
        self._note(image, IMAGE)
        with torch.enable_grad(), torch.device("meta"), keyed(0, 0), self._calls_seen():
            result = self.model(image)
        output = tree_map(self._as_value, result)
        if not any(isinstance(one, Value) for one in tree_leaves(output, is_leaf=is_reference)):
            raise CannotRecord("its forward gives no tensor")
        return Recording(
            *(tuple(self._steps), output, self._sizes, frozenset(self._changed)),
            *(frozenset(self._drawing), self._loose),
        )

    @contextmanager
    def _calls_seen(self) -> Iterator[None]:
        original = nn.Module.__call__
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._module(original, module, args, kwargs)

        def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            return recorder._function(own_apply.__get__(None, kind), args, kwargs)

        own_apply = torch.autograd.Function.__dict__["apply"]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            with _Functions(self._function):
                yield
        finally:
            torch.autograd.Function.apply = own_apply  # type: ignore[method-assign]
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        path = self._paths.get(id(module))
        if self._inside or path is None:
            return original(module, *args, **kwargs)
        if not self._is_whole(module, path):
            if module is self.model:
                return original(module, *args, **kwargs)
            self.owners.append(path)
            result = original(module, *args, **kwargs)
            self.owners.pop()
            return result
        nth, self._calls[path] = self._calls[path], self._calls[path] + 1
        before = numbers_drawn()
        result = self._step(path, lambda: original(module, *args, **kwargs), args, kwargs, nth)
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
        return id(module) in self._blocks or type(module).__module__.startswith("torch.nn.")

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
            if self._written():
                raise CannotRecord("its forward writes into a tensor by what is not of PyTorch")
            own_args, own_kwargs = tree_map(self._as_value, (args, kwargs))
            result = run()
            tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
            written = self._written()
            self._changed.update(self._values[id(tensor)] for tensor in written)
            if tensors or written or isinstance(call, str):
                gives = tuple(Value(len(self._steps), part) for part in range(len(tensors)))
                with_grad = torch.is_grad_enabled()
                owner = self.owners[-1]
                where = users_line()
                self._steps.append(
                    Step(call, own_args, own_kwargs, gives, owner, nth, with_grad, where)
                )
                self._note_all(tensors, gives, written)
            return result
        finally:
            self._inside = False

    def _note_all(
        self, tensors: Sequence[Tensor], gives: Sequence[Value], written: Sequence[Tensor]
    ) -> None:
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise CannotRecord("its forward switches autocast on; do that inside of a block")
        for tensor, value in zip(tensors, gives, strict=True):
            self._note(tensor, value)
        given = set(map(id, tensors))
        for tensor in written:
            if id(tensor) not in given:
                self._rename(tensor)

    def _written(self) -> list[Tensor]:
        """What has been written into since it was noted."""
        return [tensor for tensor, version in self._seen if tensor._version != version]

    def _rename(self, tensor: Tensor) -> None:
        """What was written in place is a new value from here on, also for another stage."""
        old, new = self._as_value(tensor), Value(len(self._steps))
        self._steps.append(Step(_itself, (old,), {}, (new,), self.owners[-1]))
        self._note(tensor, new)

    def _note(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._seen = [one for one in self._seen if one[0] is not tensor]
        self._seen.append((tensor, tensor._version))
        self._sizes[value] = tensor.numel()

    def _as_value(self, one: Any) -> Any:
        if isinstance(one, nn.Module | FunctionType):
            raise CannotRecord("its forward hands a function or a module on, as a checkpoint does")
        if not isinstance(one, Tensor):
            return one
        found = self._values.get(id(one)) or self._attributes.get(id(one))
        if found is None:
            raise CannotRecord(
                f"its forward uses a tensor of shape {tuple(one.shape)} of which is not seen where "
                "it comes from (an attribute that is no buffer, code that is not of PyTorch); let "
                "a module of its own do that"
            )
        return found


def _itself(x: Tensor) -> Tensor:
    return x


class _Functions(TorchFunctionMode):
    """Hands every function of PyTorch that is called on."""

    def __init__(self, seen: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._seen(func, args, kwargs or {})


replays(_Recorder.record.__code__)
