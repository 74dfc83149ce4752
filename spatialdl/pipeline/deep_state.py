"""What a Python object holds, in a form that can be compared with what it holds later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
