"""PyTorch's functions that are written in Python, so that the operations inside them are seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_COMPOSITE = ("torch.nn.functional", "torch.functional")
_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
_METHODS: set[Any] = {
    torch.Tensor.backward,
    torch.autograd.backward,  # what is recomputed inside must find its handlers
    torch.autograd.grad,
    torch.Tensor.split,
    torch.Tensor.norm,
    torch.Tensor.__iter__,
}


@functools.cache
def inside(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of PyTorch written in Python, so that the table sees the operations inside it.

    Such a function first asks whether an operand wants to handle it, and would ask for ever: this
    is a copy that does not ask.

    Returns:
        None if `function` is not written in Python.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if function.__module__ not in _COMPOSITE and function not in _METHODS:
        return None
    names = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *args: False)}
    copy = types.FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        _inside_cells(function.__closure__),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _inside_cells(cells: tuple[types.CellType, ...] | None) -> tuple[types.CellType, ...] | None:
    """Max pooling, for one, is chosen between two functions that ask on their own."""
    if cells is None:
        return None
    contents = [cell.cell_contents for cell in cells]
    return tuple(
        types.CellType((inside(value) or value) if callable(value) else value) for value in contents
    )
