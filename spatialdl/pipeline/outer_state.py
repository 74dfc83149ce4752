"""State outside of modules that a forward reads: global variables, closures, attributes of classes.

It has no place in any stage: what changes there between two runs is refused.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from spatialdl.pipeline.deep_state import form_of
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
