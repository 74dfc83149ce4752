"""The table of operations: which handler does what on a split image.

A handler is found by the function that was called. What no table knows is tried as a pointwise
operation (`operands`), and refused by the guard (`tensor`) if it is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from spatialdl.errors import UnsupportedSpatialOp

Handler = TypeVar("Handler", bound=Callable[..., Any])
_HOLDERS = (torch.Tensor, list, tuple, dict)
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
WITH_PREFIX: set[Callable[..., Any]] = set()
"""The functions whose handlers take tokens that belong to no pixel, see `prefix`."""


class SplitOperand(Protocol):
    """What the table knows of a `SpatialTensor`, which stands above it."""

    def describe(self) -> str:
        """How it is split, for messages."""


def register_op(
    *torch_functions: Callable[..., Any],
    split: Sequence[str] | None = None,
    prefix: bool = False,
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
        prefix: whether it is right for tokens of an image that come with others beside them, such
            as class tokens: ``spatial_dims`` has a prefix or suffix then. Otherwise those are
            refused.

    Returns:
        A decorator, which gives the function back as it was.

    Example:
        >>> @spatialdl.register_op(torch.nn.functional.my_op)
        ... def my_op(x, inplace=False):
        ...     return spatialdl.from_local(...)
    """

    def register(handler: Handler) -> Handler:
        if prefix:
            WITH_PREFIX.update(torch_functions)
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
    kinds = {one.kind for one in signature.parameters.values()}
    names, known = tuple(signature.parameters), signature.parameters.keys()
    plain = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    needed = sum(one.default is inspect.Parameter.empty for one in signature.parameters.values())

    def bound(args: Any, kwargs: Any) -> Iterable[tuple[str, Any]]:
        """Arguments by name; the short way where they are positions alone."""
        if plain and len(args) <= len(names):
            by_name = {**dict(zip(names, args, strict=False)), **kwargs}
            # as many as were given: none twice
            fits = len(by_name) == len(args) + len(kwargs) and by_name.keys() <= known
            if fits and all(name in by_name for name in names[len(args) : needed]):
                return by_name.items()
        try:
            return signature.bind(*args, **kwargs).arguments.items()
        except TypeError as error:
            raise refusal(
                function, spatial_in((args, kwargs)), f"with these arguments ({error})"
            ) from None

    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in bound(args, kwargs):
            if name not in split and isinstance(value, _HOLDERS) and spatial_in(value):
                raise refusal(function, spatial_in(value), f"its {name} cannot be a split tensor")
        return handler(*args, **kwargs)

    return call


def is_spatial(value: object) -> TypeGuard[SplitOperand]:
    return hasattr(type(value), "full_tensor") and hasattr(value, "spatial_layout")


def spatial_in(values: Any) -> list[SplitOperand]:
    """All split tensors among nested arguments."""
    if isinstance(values, torch.Tensor):
        return [values] if is_spatial(values) else []
    return [value for value in tree_flatten(values)[0] if is_spatial(value)]


def refusal(func: Any, operands: Iterable[SplitOperand], advice: str = "") -> UnsupportedSpatialOp:
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
