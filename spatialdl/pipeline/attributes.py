"""Module attributes that a forward reads and changes, which a list of steps cannot contain.

Attributes read by code between the steps are constants of the recording. Attributes read by a
module that is called as a whole belong to the one stage that has the module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from spatialdl.pipeline.outer_state import form_of
from spatialdl.torch_internals import BatchNormBase

_ALWAYS = frozenset(vars(nn.Module())) - {"training"} | {"__dict__", "__class__"}
"""Attributes of every module, whose content is handled separately."""


class CodeRegion(NamedTuple):
    """Place of code: in a module that is called as a whole, or between the steps of one."""

    path: str
    whole: bool


class AttributeKey(NamedTuple):
    """An attribute of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


class Attributes:
    """Tracks attributes of a network while its forward runs.

    Args:
        model: the network; the classes of its modules are replaced during the run.
        region: returns the place of the running code.
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
        self._objects: dict[AttributeKey, set[int]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of the forward."""
        self._start = self._forms()
        kinds: dict[str, Any] = {path: type(module) for path, module in self._modules.items()}
        _watching.append(self)
        try:
            for path, module in self._modules.items():
                module.__class__ = _watched(kinds[path])
            yield
        finally:
            for path, module in self._modules.items():
                object.__setattr__(module, "__class__", kinds[path])  # not tracked as a write
            _watching.pop()
            self._end = self._forms()
        self._changed |= {
            key
            for key in self._start.keys() | self._end.keys()
            if self._start.get(key) != self._end.get(key)
        }

    def read(self, module: nn.Module, name: str) -> None:
        region = self._region()
        access = id(module), name, region
        if access in self._seen:
            return
        self._seen.add(access)
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
            settled: whether this is a repeated run; the first may initialize attributes.
        """
        lost = {}
        for group in self._together():
            users = set[CodeRegion]().union(*(self._users[key] for key in group))
            wholes = {region for region in users if region.whole}
            if users == wholes:
                is_lost = len(wholes) > 1
            else:
                first = settled and bool(group & self._read_first)
                is_lost = bool(wholes) or first or bool(group & self._registered)
            if is_lost:
                lost[min(group)] = users
        for key in self.constants():
            if key.name == "training" and isinstance(self._modules[key.path], BatchNormBase):
                lost[key] = self._users[key]  # BatchNorm does not train while it is recorded
        return lost

    def kept(self) -> set[AttributeKey]:
        """Non-tensor attributes that the forward reads, then changes."""
        return {
            key
            for key in self._read_first & self._changed - self._registered
            if key.name != "training" and self._start.get(key) != self._end.get(key)
        }

    def constants(self) -> set[AttributeKey]:
        """Attributes whose old value is read by code between the steps."""
        return {
            key
            for key in self._read_first & self._start.keys()
            if not all(user.whole for user in self._users[key])
        }

    def _together(self) -> list[set[AttributeKey]]:
        """Groups of changed attributes; those that reference the same object are in one group."""
        groups: list[tuple[set[AttributeKey], set[int]]] = []
        for key in sorted(self._changed):
            keys, objects = {key}, self._objects.get(key, set())
            for group in [other for other in groups if other[1] & objects]:
                groups.remove(group)
                keys, objects = keys | group[0], objects | group[1]
            groups.append((keys, objects))
        return [keys for keys, _ in groups]

    def _forms(self) -> dict[AttributeKey, Any]:
        forms = {}
        for path, module in self._modules.items():
            for name, value in own_attributes(module).items():
                reached: dict[int, object] = {}
                forms[AttributeKey(path, name)] = form_of(value, reached)
                self._objects.setdefault(AttributeKey(path, name), set()).update(reached)
        return forms


def own_attributes(module: nn.Module) -> Mapping[str, Any]:
    """Attributes of a module other than parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _ALWAYS}


_watching: list[Attributes] = []


@cache
def _watched(kind: Hashable) -> Any:
    """Make a subclass that reports attribute writes, and reads unless it is PyTorch's class.

    PyTorch's layers are called as a whole and read only their own attributes.
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
    """Whether a module class is PyTorch's."""
    return kind.__module__.startswith("torch.nn.")


def _value(module: nn.Module, name: str) -> object:
    """Value of an attribute, without running the module's own code."""
    for place in (vars(module), module._buffers, module._parameters, module._modules):
        if name in place:
            return place[name]
    return None
