"""State outside of modules that a forward reads: globals, closures, class attributes.

It belongs to no stage, so networks in which it changes between two runs are refused.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.pipeline.source_lines import is_library

_DESCRIPTORS = (FunctionType, classmethod, staticmethod, property)


class OuterState:
    """State that the code of a forward reads outside of its modules.

    Attributes:
        found: forms by name, at the first call of the code that reads them; those of classes at
            the end.
        draws: non-PyTorch generator that the forward draws random numbers from; empty if none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.found: dict[str, Any] = {}
        self.draws = ""
        self._seen: set[CodeType] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of the forward; restores random generators afterwards."""
        python, numpy = random.getstate(), np.random.get_state()
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # callbacks of the garbage collector are not part of the forward
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
            if random.getstate() != python:
                self.draws = "Python's random"
            if form_of(np.random.get_state()) != form_of(numpy):
                self.draws = "NumPy's random"
            random.setstate(python)
            np.random.set_state(numpy)
            self._look_at_classes()

    def differs(self, other: OuterState) -> str:
        """Name of an entry that differs; empty if none."""
        names = self.found.keys() & other.found.keys()
        return next((name for name in sorted(names) if self.found[name] != other.found[name]), "")

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        if is_library(code.co_filename):
            return
        own = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
        for name, value in own.items():
            where = f"{frame.f_globals.get('__name__')}.{name}"
            if isinstance(value, ModuleType | type):
                for inner in set(code.co_names) & vars(value).keys():
                    self._note(f"{where}.{inner}", vars(value)[inner])
            else:
                self._note(where, value)

    def _look_at_classes(self) -> None:
        kinds = (kind for module in self._model.modules() for kind in type(module).__mro__)
        for kind in dict.fromkeys(kinds):
            if kind.__module__.startswith("torch.nn.") or kind is object:
                continue
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    self._note(f"{kind.__qualname__}.{name}", value)

    def _note(self, name: str, value: object) -> None:
        if not isinstance(value, (ModuleType, type, *_DESCRIPTORS[1:])):
            self.found.setdefault(name, form_of(value))


_PLAIN = (
    *(bool, int, complex, str, bytes, type(None), type, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def form_of(value: object, reached: dict[int, object] | None = None) -> Any:
    """Comparable form of an object's content, as far as Python exposes it.

    Tensors, modules and opaque objects all have the form of their type.

    Args:
        reached: collects the mutable objects within it, by id.
    """
    return _form(value, {} if reached is None else reached)


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
