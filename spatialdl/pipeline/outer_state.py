"""State outside of modules that a forward reads: global variables, closures, attributes of classes.

It has no place in any stage: what changes there between two runs is refused.
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
    """What the code of a forward finds outside of its modules.

    Attributes:
        found: forms by name, as they were when the code that reads them was first called; those of
            classes as they were in the end.
        draws: the generator from which the forward has drawn random numbers; empty if none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.found: dict[str, Any] = {}
        self.draws = ""
        self._seen: set[CodeType] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward; random generators are as before when it ends."""
        python, numpy = random.getstate(), np.random.get_state()
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # callbacks of the garbage collector are no part of the forward
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
        """The name of something that differs; empty if nothing does."""
        names = self.found.keys() & other.found.keys()
        return next((name for name in sorted(names) if self.found[name] != other.found[name]), "")

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or is_library(code.co_filename):
            return
        self._seen.add(code)
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


def form_of(one: object, reached: dict[int, object] | None = None) -> Any:
    """What an object holds, as far as Python shows it.

    Tensors, modules and what shows nothing of its content are all alike.

    Args:
        reached: gets the objects within it that can change, by their ids.
    """
    return _form(one, {} if reached is None else reached)


def _form(one: Any, reached: dict[int, object]) -> Any:  # noqa: PLR0911, one line a kind
    if isinstance(one, float):
        return float, one.hex()  # not a number is itself
    if isinstance(one, _PLAIN):
        return type(one), str(one)
    if isinstance(one, Tensor | nn.Module | ModuleType | BuiltinFunctionType):
        return type(one).__name__
    if id(one) in reached:
        return "seen"
    reached[id(one)] = one
    if isinstance(one, np.ndarray):
        return one.shape, str(one.dtype), one.tobytes()
    if isinstance(one, MethodType):
        return one.__name__, _form(one.__self__, reached)
    if isinstance(one, FunctionType):
        cells = [_content(cell) for cell in one.__closure__ or ()]
        return one.__qualname__, _form([cells, vars(one)], reached)
    if isinstance(one, Set):
        return type(one), sorted(str(_form(k, reached)) for k in one)
    parts = one if isinstance(one, Sequence) else _parts(one)
    return type(one), [_form(part, reached) for part in parts]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _parts(one: Any) -> list[Any]:
    """What a copy of an object would be made of."""
    if isinstance(one, Mapping):
        return [*one.keys(), *one.values()]
    try:
        reduced = one.__reduce_ex__(4)
    except Exception:  # what cannot be copied, as a lock or a generator
        return [vars(one)] if hasattr(one, "__dict__") else []
    if isinstance(reduced, str):
        return [reduced]
    arguments, state, items, pairs = (*reduced[1:5], None, None, None)[:4]
    return [arguments, state, list(items or ()), list(pairs or ())]
