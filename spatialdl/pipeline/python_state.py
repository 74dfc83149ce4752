"""Python state that a forward changes, which a list of steps cannot contain.

That is attributes of modules, and class attributes and globals that their methods name. Runs of a
forward are compared by snapshots. A module that is called as a whole may change its own attributes,
as they belong to the one stage that has it. Attributes of the other modules are constants of the
recording, which only a first run may initialize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_ALWAYS = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
"""Attributes of every module, whose content is handled separately."""


class AttributeKey(NamedTuple):
    """An attribute, buffer or parameter of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


class PythonState:
    """Finds changes of Python state in one run of a forward.

    Args:
        model: the network, before the run.

    Attributes:
        inside: attributes that change while a module that has them is called as a whole.
        lost: attributes of such modules that change in between.
        between: attributes that differ at the end of the run since the last look at them.
        outside: name of a class attribute or global that has changed; empty if none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, dict(model.named_modules())
        self._forms = {path: _forms_of(module) for path, module in self._modules.items()}
        self._outer = _outer_forms(model)
        self.inside: set[AttributeKey] = set()
        self.lost: set[AttributeKey] = set()
        self.between: set[AttributeKey] = set()
        self.outside = ""

    def enter(self, path: str) -> None:
        """Look at a module before it is called as a whole."""
        self.lost |= self._look(path)

    def leave(self, path: str) -> None:
        """Look at a module after it was called as a whole."""
        self.inside |= self._look(path)

    def finish(self) -> None:
        """Look at everything after the run."""
        self.between = self._look("")
        now = _outer_forms(self._model)
        self.outside = next((name for name in now if now[name] != self._outer.get(name)), "")

    def changed(self) -> set[AttributeKey]:
        """All attributes that have changed, without modes, parameters and buffers."""
        everything = self.inside | self.lost | self.between
        return {key for key in everything if key.name != "training" and not self.is_registered(key)}

    def is_registered(self, key: AttributeKey) -> bool:
        """Whether an attribute is a parameter or buffer, which was replaced."""
        module = self._modules[key.path]
        return key.name in module._parameters or key.name in module._buffers

    def _look(self, path: str) -> set[AttributeKey]:
        """Attributes of a module and its parts that have changed since the last look."""
        changed = set()
        for inner, module in self._modules.items():
            if not path or inner == path or inner.startswith(f"{path}."):
                old, new = self._forms[inner], _forms_of(module)
                names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
                changed |= {AttributeKey(inner, name) for name in names}
                self._forms[inner] = new
        return changed


def own_attributes(module: nn.Module) -> Mapping[str, Any]:
    """Attributes of a module other than parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _ALWAYS}


def _forms_of(module: nn.Module) -> dict[str, Any]:
    registered = {**module._parameters, **module._buffers}  # values may change, not the objects
    forms: dict[str, Any] = {name: form_of(value) for name, value in own_attributes(module).items()}
    return forms | {name: id(tensor) for name, tensor in registered.items()}


def _outer_forms(model: nn.Module) -> dict[str, Any]:
    """Forms of class attributes, closures, and globals that methods name, by name."""
    forms = {}
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    for kind in kinds:
        if kind is object or kind.__module__.startswith("torch."):
            continue
        for name, value in vars(kind).items():
            if name.startswith("__"):
                continue
            forms[f"{kind.__qualname__}.{name}"] = form_of(value)
            if isinstance(value, FunctionType):
                names = value.__globals__.keys() & set(value.__code__.co_names)
                forms |= {f"{value.__module__}.{n}": form_of(value.__globals__[n]) for n in names}
    return forms


# --- forms of objects


_PLAIN = (
    *(bool, int, complex, str, bytes, type(None), type, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def form_of(value: object) -> Any:
    """Comparable form of an object's content, as far as Python exposes it.

    Tensors, modules and opaque objects all have the form of their type.
    """
    return _form(value, {})


def _form(value: Any, reached: dict[int, object]) -> Any:  # noqa: PLR0911, one line a kind
    if isinstance(value, float):
        return float, value.hex()  # so that NaN equals itself
    if isinstance(value, _PLAIN):
        return type(value), str(value)
    if isinstance(value, Tensor | nn.Module | ModuleType | BuiltinFunctionType):
        return type(value).__name__
    if id(value) in reached:
        return "seen"
    reached[id(value)] = value
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, MethodType):
        return value.__name__, _form(value.__self__, reached)
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return value.__qualname__, _form([cells, vars(value)], reached)
    if isinstance(value, Set):
        return type(value), sorted(str(_form(k, reached)) for k in value)
    parts = value if isinstance(value, Sequence) else _parts(value)
    return type(value), [_form(part, reached) for part in parts]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _parts(value: Any) -> list[Any]:
    """The parts that a copy of an object consists of."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # objects that cannot be copied, such as locks and generators
        return [vars(value)] if hasattr(value, "__dict__") else []
    if isinstance(reduced, str):
        return [reduced]
    arguments, state, items, pairs = (*reduced[1:5], None, None, None)[:4]
    return [arguments, state, list(items or ()), list(pairs or ())]
