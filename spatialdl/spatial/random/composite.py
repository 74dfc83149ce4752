"""Access to the operations inside PyTorch's functions that are written in Python."""

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
    torch.autograd.backward,  # recomputation inside must find its handlers
    torch.autograd.grad,
    torch.Tensor.split,
    torch.Tensor.norm,
    torch.Tensor.__iter__,
}


@functools.cache
def inside(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Copy of a PyTorch function written in Python that dispatches its inner operations only.

    The original first checks for operands with ``__torch_function__`` and would recurse
    infinitely; the copy skips this check.

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
    """Copy closures too: max pooling, for example, selects one of two such functions."""
    if cells is None:
        return None
    contents = [cell.cell_contents for cell in cells]
    return tuple(
        types.CellType((inside(value) or value) if callable(value) else value) for value in contents
    )
