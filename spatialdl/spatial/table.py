"""The table of operations: which handler does what on a split image.

A handler is found by the function that was called. What no table knows is tried as a pointwise
operation (`operands`), and refused by the guard (`tensor`) if it is none.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from spatialdl.errors import UnsupportedSpatialOp

if TYPE_CHECKING:
    from spatialdl.spatial.tensor import SpatialTensor

Handler = TypeVar("Handler", bound=Callable[..., Any])
_HOLDERS = (torch.Tensor, list, tuple, dict)
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def register_op(
    *torch_functions: Callable[..., Any], split: Sequence[str] | None = None
) -> Callable[[Handler], Handler]:
    """Teach SpatialTensor one more operation.

    The decorated function takes the arguments of `torch_functions` (functions of ``torch``,
    ``torch.nn.functional`` or methods of ``torch.Tensor``) whenever one of them is a
    SpatialTensor, and does it on a split image, or raises `UnsupportedSpatialOp`.

    Args:
        torch_functions: all names by which the operation is called.
        split: names of the parameters that may be SpatialTensors, or hold some; anything else, and
            arguments that the decorated function does not take, are refused for it. If not given,
            it must look at all arguments itself.

    Example:
        >>> @spatialdl.register_op(torch.nn.functional.my_op)
        ... def my_op(x, inplace=False):
        ...     return spatialdl.from_local(...)
    """

    def register(handler: Handler) -> Handler:
        for function in torch_functions:
            HANDLERS[function] = (
                handler if split is None else _checked(function, handler, tuple(split))
            )
        return handler

    return register


def any_other(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The key of the handler for every function that has none of its own: see `operands`."""
    return args, kwargs


HANDLERS[any_other] = any_other


def _checked(
    function: Callable[..., Any], handler: Callable[..., Any], split: tuple[str, ...]
) -> Callable[..., Any]:
    signature = inspect.signature(handler)

    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(
                function, spatial_in((args, kwargs)), f"with these arguments ({error})"
            ) from None
        for name, value in bound.arguments.items():
            if name not in split and isinstance(value, _HOLDERS) and spatial_in(value):
                raise refusal(function, spatial_in(value), f"its {name} cannot be a split tensor")
        return handler(*args, **kwargs)

    return call


def is_spatial(value: object) -> bool:
    return hasattr(type(value), "full_tensor") and hasattr(value, "spatial_layout")


def spatial_in(values: Any) -> list[SpatialTensor]:
    """All split tensors among nested arguments."""
    return [value for value in tree_flatten(values)[0] if is_spatial(value)]


def refusal(func: Any, operands: Iterable[SpatialTensor], advice: str = "") -> UnsupportedSpatialOp:
    """The error that names the operation, the layout and what to do."""
    name = str(func)
    if not isinstance(func, torch._ops.OpOverload):
        name = getattr(func, "__name__", name)
        if name in ("__get__", "__set__"):  # of a property such as Tensor.mT
            name = getattr(func.__self__, "__name__", name)
    where = "".join(f" on an image split {x.describe()}" for x in list(operands)[:1])
    advice = advice or (
        "call full_tensor() before it to gather the image on every rank, or teach it with "
        "spatialdl.register_op"
    )
    return UnsupportedSpatialOp(f"{name} cannot be done{where}: {advice}")


# --- functions of torch.nn.functional that are written in Python

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
