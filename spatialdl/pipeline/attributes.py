"""Attributes of modules that a forward reads and changes, which a list of steps cannot contain.

What code between the steps reads is a constant of the recording. What a module that is called as a
whole reads is its own, in the one stage that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spatialdl.pipeline.outer_state import form_of

_ALWAYS = frozenset(vars(nn.Module())) - {"training"} | {"__dict__", "__class__"}
"""What every module has; their content is looked at by itself."""


class CodeRegion(NamedTuple):
    """Where code runs: in a module that is called as a whole, or between the steps of one."""

    path: str
    whole: bool


class AttributeKey(NamedTuple):
    """An attribute of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


class Attributes:
    """Those of a network while its forward runs.

    Args:
        model: its modules; their classes are exchanged while it runs.
        region: where the code that runs now is.
    """

    def __init__(self, model: nn.Module, region: Callable[[], CodeRegion]) -> None:
        self._modules = dict(model.named_modules())
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._region = region
        self._users: dict[AttributeKey, set[CodeRegion]] = defaultdict(set)
        self._seen: set[tuple[int, str, CodeRegion]] = set()
        self._written: set[AttributeKey] = set()
        self._changed: set[AttributeKey] = set()
        self._read_first: set[AttributeKey] = set()
        self._registered: set[AttributeKey] = set()
        self._start: dict[AttributeKey, Any] = {}
        self._end: dict[AttributeKey, Any] = {}
        self._within: dict[AttributeKey, set[int]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward."""
        self._start = self._forms()
        kinds: dict[str, Any] = {path: type(module) for path, module in self._modules.items()}
        _watching.append(self)
        try:
            for path, module in self._modules.items():
                module.__class__ = _watched(kinds[path])
            yield
        finally:
            for path, module in self._modules.items():
                object.__setattr__(module, "__class__", kinds[path])  # not as a write
            _watching.pop()
            self._end = self._forms()
        self._changed |= {
            key
            for key in self._start.keys() | self._end.keys()
            if self._start.get(key) != self._end.get(key)
        }

    def read(self, module: nn.Module, name: str) -> None:
        region = self._region()
        seen = id(module), name, region
        if seen in self._seen:
            return
        self._seen.add(seen)
        key = AttributeKey(self._paths[id(module)], name)
        self._users[key].add(region)
        if key not in self._written:
            self._read_first.add(key)

    def write(self, module: nn.Module, name: str, value: object, old: object) -> None:
        key = AttributeKey(self._paths[id(module)], name)
        region = self._region()
        self._users[key].add(region)
        is_within = region.whole and f"{key.path}.".startswith(f"{region.path}.")
        if is_of_torch(type(module)) and not is_within:
            self._users[key].add(CodeRegion(key.path, True))
        self._written.add(key)
        if name in module._buffers or name in module._parameters:
            self._registered.add(key)
        is_state = isinstance(value, Tensor | nn.Module)
        is_same = value is old or (not is_state and form_of(value) == form_of(old))
        if name == "training" or not is_same:
            self._changed.add(key)

    def parted(self, *, settled: bool) -> dict[AttributeKey, set[CodeRegion]]:
        """Attributes whose changes a cut would lose, with the code that must stay together.

        Args:
            settled: whether this is not the first run, in which forwards prepare something.
        """
        found = {}
        for group in self._together():
            users = set[CodeRegion]().union(*(self._users[key] for key in group))
            wholes = {region for region in users if region.whole}
            if users == wholes:
                lost = len(wholes) > 1
            else:
                first = settled and bool(group & self._read_first)
                lost = bool(wholes) or first or bool(group & self._registered)
            if lost:
                found[min(group)] = users
        for key in self.constants():
            if key.name == "training" and isinstance(self._modules[key.path], _BatchNorm):
                found[key] = self._users[key]  # which does not train while it is recorded
        return found

    def kept(self) -> set[AttributeKey]:
        """Attributes other than tensors that the forward reads, and has changed in the end."""
        return {
            key
            for key in self._read_first & self._changed - self._registered
            if key.name != "training" and self._start.get(key) != self._end.get(key)
        }

    def constants(self) -> set[AttributeKey]:
        """What code between the steps reads as it was before the forward."""
        return {
            key
            for key in self._read_first & self._start.keys()
            if not all(user.whole for user in self._users[key])
        }

    def _together(self) -> list[set[AttributeKey]]:
        """The attributes that change, those that hold the same object in one set."""
        groups: list[tuple[set[AttributeKey], set[int]]] = []
        for key in sorted(self._changed):
            keys, within = {key}, self._within.get(key, set())
            for group in [one for one in groups if one[1] & within]:
                groups.remove(group)
                keys, within = keys | group[0], within | group[1]
            groups.append((keys, within))
        return [keys for keys, _ in groups]

    def _forms(self) -> dict[AttributeKey, Any]:
        found = {}
        for path, module in self._modules.items():
            for name, value in own_attributes(module).items():
                reached: dict[int, object] = {}
                found[AttributeKey(path, name)] = form_of(value, reached)
                self._within.setdefault(AttributeKey(path, name), set()).update(reached)
        return found


def own_attributes(module: nn.Module) -> Mapping[str, Any]:
    """What a module keeps beside parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _ALWAYS}


_watching: list[Attributes] = []


@cache
def _watched(kind: Hashable) -> Any:
    """A class whose instances report what is written, and if they are not of PyTorch what is read.

    PyTorch's layers are called as a whole and read nothing but their own.
    """
    original: Any = kind

    def read(self: Any, name: str) -> Any:
        if name not in _ALWAYS:
            _watching[-1].read(self, name)
        return get(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        old = _value(self, name)
        original.__setattr__(self, name, value)
        _watching[-1].write(self, name, value, old)

    def delete(self: Any, name: str) -> None:
        old = _value(self, name)
        original.__delattr__(self, name)
        _watching[-1].write(self, name, None, old)

    get = original.__getattribute__
    body: dict[str, Any] = {"__setattr__": write, "__delattr__": delete}
    if not is_of_torch(original):
        body["__getattribute__"] = read
    return type(original.__name__, (original,), {**body, "__module__": original.__module__})


def is_of_torch(kind: type) -> bool:
    """Whether a class of modules is PyTorch's."""
    return kind.__module__.startswith("torch.nn.")


def _value(module: nn.Module, name: str) -> object:
    """As it is, without asking the module's own code."""
    for place in (vars(module), module._buffers, module._parameters, module._modules):
        if name in place:
            return place[name]
    return None
