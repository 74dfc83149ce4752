"""What handlers know of PyTorch's functions: the operations inside of them, and their arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spatialdl.torch_internals import OpOverloadPacket

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


# --- arguments of functions without a signature, as those written in C++


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its parameters."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def argument(
    name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None
) -> Any:
    """The argument of a call that is passed by this name, or at this place."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def numbers_of(values: Sequence[Any]) -> Sequence[Any]:
    """The numbers of PyTorch's ``f(2, 3)`` or ``f((2, 3))``."""
    return values[0] if values and isinstance(values[0], Sequence) else values


def functions_of(holder: Any, names: str) -> list[Callable[..., Any]]:
    """The functions of a module or class with these names, separated by spaces."""
    return [getattr(holder, name) for name in names.split()]


def tags_of(name: str) -> list[list[torch.Tag]]:
    """The tags of each overload of an operator; empty if there is none of this name."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload).tags for overload in packet.overloads()]  # type: ignore[no-untyped-call]


def getter(name: str) -> Callable[..., Any]:
    """The function that reads a property of a tensor."""
    return getattr(torch.Tensor, name).__get__  # type: ignore[no-any-return]
