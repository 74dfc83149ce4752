"""The table of handlers of operations on split images, keyed by the called function.

A function without a handler is tried as a pointwise operation (`operands`) and refused if it is
not pointwise (`tensor`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import torch

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.random.composite import by_name
from spatialdl.torch_internals import OpOverload, tree_flatten

Handler = TypeVar("Handler", bound=Callable[..., Any])
_HOLDERS = (torch.Tensor, list, tuple, dict)
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
WITH_PREFIX: set[Callable[..., Any]] = set()
"""Functions with handlers that support tokens that belong to no pixel, see `prefix`."""


class SplitOperand(Protocol):
    """The interface of `SpatialTensor` used here, as `tensor` imports this module."""

    def describe(self) -> str:
        """The grid and the image size, for messages."""


def register_op(
    *torch_functions: Callable[..., Any],
    split: Sequence[str] | None = None,
    prefix: bool = False,
) -> Callable[[Handler], Handler]:
    """Register a handler of an operation on split images.

    The decorated function is called with the arguments of `torch_functions` (functions of
    ``torch``, ``torch.nn.functional`` or methods of ``torch.Tensor``) if any argument is a
    SpatialTensor. It computes the result or raises `UnsupportedSpatialOp`. Compose it of supported
    operations, which communicate and have exact backward; in your own network call these instead.

    Args:
        torch_functions: all names of the operation.
        split: names of the parameters that may be or contain SpatialTensors. SpatialTensors in
            other parameters, and arguments that the handler does not take, are refused. If None,
            the handler must check all arguments itself.
        prefix: whether the handler supports tokens of an image together with extra tokens such as
            class tokens, given by a prefix or suffix in ``spatial_dims``. Otherwise they are
            refused.

    Returns:
        A decorator that returns the function unchanged.

    Warns:
        UserWarning: the package has a handler of the operation, which is replaced.

    Example:
        >>> @spatialdl.register_op(torch.nn.functional.cosine_similarity)
        ... def cosine_similarity(x1, x2, dim=1, eps=1e-8):
        ...     return (F.normalize(x1, dim=dim) * F.normalize(x2, dim=dim)).sum(dim)
    """

    def register(handler: Handler) -> Handler:
        if prefix:
            WITH_PREFIX.update(torch_functions)
        for function in torch_functions:
            _check_new(function, handler)
            HANDLERS[function] = (
                handler if split is None else _check_operands(function, handler, tuple(split))
            )
        return handler

    return register


def register_refusal(advice: str, functions: Iterable[Callable[..., Any]]) -> None:
    """Refuse functions by name on split images, with this advice."""
    for function in functions:

        @register_op(function, prefix=True)
        def refuse(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            raise refusal(function, spatial_in((args, kwargs)), advice)


def _check_new(function: Callable[..., Any], handler: Callable[..., Any]) -> None:
    """Warn before a handler of the package is replaced by one from elsewhere."""
    package, _, _ = __name__.partition(".")
    before, after = (
        getattr(each, "__module__", "").partition(".")[0] == package
        for each in (HANDLERS.get(function), handler)
    )
    if before and not after:
        warnings.warn(
            f"{name_of(function)} works on split images already; register_op replaces the "
            f"package's handler by {handler.__module__}.{handler.__qualname__}",
            stacklevel=4,
        )


def any_other(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The key of the handler for functions without a handler, see `operands`."""
    return args, kwargs


HANDLERS[any_other] = any_other


def _check_operands(
    function: Callable[..., Any], handler: Callable[..., Any], split: tuple[str, ...]
) -> Callable[..., Any]:
    signature = inspect.signature(handler)
    kinds = {one.kind for one in signature.parameters.values()}
    names, known = tuple(signature.parameters), signature.parameters.keys()
    plain = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    needed = sum(one.default is inspect.Parameter.empty for one in signature.parameters.values())

    def bind(args: Any, kwargs: Any) -> Iterable[tuple[str, Any]] | None:
        """Arguments by name, without `Signature.bind` in the common case; None if they misfit."""
        if plain and len(args) <= len(names):
            given = by_name(names, args, kwargs)
            # Equal counts: no argument was passed twice.
            fits = len(given) == len(args) + len(kwargs) and given.keys() <= known
            if fits and all(name in given for name in names[len(args) : needed]):
                return given.items()
        try:
            return signature.bind(*args, **kwargs).arguments.items()
        except TypeError:
            return None

    def in_order(args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Arguments by the names of PyTorch's operator, in its order."""
        for parameters in _parameters_of(function):
            given = dict(zip(parameters, args, strict=False)) | {
                "self" if name == "input" else name: value for name, value in kwargs.items()
            }
            last = max((n for n, name in enumerate(parameters) if name in given), default=-1)
            if given.keys() <= parameters.keys() and len(given) == len(args) + len(kwargs):
                return tuple((parameters | given).values())[: last + 1]
        named = ", ".join(kwargs) or "none by name"
        said = f"unsupported arguments ({len(args)}, {named})"
        raise refusal(function, spatial_in((args, kwargs)), said)

    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        forms, bound = [], bind(args, kwargs)
        if bound is None:
            args, kwargs = in_order(args, kwargs), {}
            bound = bind(args, kwargs)
        if bound is None:
            raise refusal(function, spatial_in(args), "unsupported arguments")
        for name, value in bound:
            if not isinstance(value, _HOLDERS):
                forms.append((name, value.__class__, value))
                continue
            if name not in split and spatial_in(value):
                raise refusal(function, spatial_in(value), f"its {name} cannot be a split tensor")
            forms.append((name, value.__class__, _form(value)))
        if function not in _CONVOLUTIONS:
            _check_accepted(function, tuple(forms), args, kwargs)
        return handler(*args, **kwargs)

    return call


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """Names and defaults of what PyTorch's operator takes by place, of each overload."""
    operator = getattr(torch.ops.aten, name_of(function), None)
    overloads = () if operator is None else map(operator.__getattr__, operator.overloads())
    return [
        {one.name: one.default_value for one in overload._schema.arguments if not one.kwarg_only}
        for overload in overloads
    ]


_CONVOLUTIONS = {
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
"""On the meta device they accept what they refuse elsewhere; their handlers check it."""

_ACCEPTED: set[Any] = set()
"""Functions with the forms of arguments that PyTorch accepts."""

_MANY = 2**14
"""Entries from which on `_ACCEPTED` is cleared."""


def _form(value: Any) -> Any:
    """A value on which alone it depends whether PyTorch accepts the argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return value


def _wide(value: Any) -> Any:
    """Tensors of half precision as of float32, with which autocast takes them together."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return torch.empty(value.shape, device="meta", dtype=torch.float32)
    return list(map(_wide, value)) if isinstance(value, list | tuple) else value


def _check_accepted(function: Callable[..., Any], forms: Any, args: Any, kwargs: Any) -> None:
    """Raise PyTorch's error if it refuses the arguments for whole tensors.

    So all ranks raise it, before any of them communicates.
    """
    key = function, forms
    try:
        if key in _ACCEPTED:
            return
    except TypeError:  # a slice, a dict: not hashable
        return
    try:
        named = {name: _wide(value) for name, value in kwargs.items()}
        meta_result(function, *map(_wide, args), **named)
    except NotImplementedError:  # no kernel
        pass
    except RuntimeError as error:
        if "meta" not in str(error).lower():  # a value is needed
            raise
    if len(_ACCEPTED) >= _MANY:
        _ACCEPTED.clear()
    _ACCEPTED.add(key)


def is_spatial(value: object) -> TypeGuard[SplitOperand]:
    return hasattr(type(value), "full_tensor") and hasattr(value, "spatial_layout")


def spatial_in(values: Any) -> list[SplitOperand]:
    """All split tensors in nested arguments."""
    if isinstance(values, torch.Tensor):
        return [values] if is_spatial(values) else []
    return [value for value in tree_flatten(values)[0] if is_spatial(value)]


def refusal(func: Any, operands: Iterable[SplitOperand], advice: str = "") -> UnsupportedSpatialOp:
    """The error with the operation, the layout and advice."""
    where = "".join(f" on an image split {x.describe()}" for x in list(operands)[:1])
    advice = advice or (
        "compose it of supported operations, or call full_tensor() before it to gather the image "
        "on every rank; in code that is not yours, by spatialdl.register_op"
    )
    return UnsupportedSpatialOp(f"{name_of(func)} is not supported{where}: {advice}")


def name_of(func: Any) -> str:
    """The name of a function, of an operator, or of the property that it gets or sets."""
    if isinstance(func, OpOverload):
        return str(func)
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # of a property such as Tensor.mT
        name = str(getattr(func.__self__, "__name__", name))
    return name
