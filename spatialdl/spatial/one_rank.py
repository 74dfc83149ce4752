"""Split tensors of a grid of one rank, whose tile is the whole tensor.

Nothing is exchanged, so such a tensor is the tile itself with a layout attached: operations and
gradients run as on a plain tensor, without a wrapper. Only whether a result would be split on
larger grids, and along which dims, must be tracked, because e.g. random numbers are drawn
differently for split and plain tensors.

Functions without a handler are either pointwise or refused on larger grids. Functions with a
handler use it, unless a rule here determines the layout of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.mesh import Mesh
from spatialdl.layout.layout import Layout
from spatialdl.spatial.dims import SpatialDims, samples_of
from spatialdl.spatial.norm import StatisticsOver
from spatialdl.spatial.random.composite import argument, functions_of, getter, inside, tags_of
from spatialdl.spatial.table import HANDLERS, refusal, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, above_split
from spatialdl.torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_dispatch,
    is_tracing,
    tree_leaves,
)

Function = Callable[..., Any]
Rule = Callable[[Function, Any, Any], Any]
_RULES: dict[Function, Rule] = {}
_CONV_DIMS: dict[Function, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class OneRankTensor(SpatialTensor):
    """A `SpatialTensor` of a grid of one rank: the tile itself, differentiated by PyTorch."""

    __torch_dispatch__ = disabled_torch_dispatch  # type: ignore[assignment]

    @property
    def _tile(self) -> Tensor:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self.detach()

    def dim(self) -> int:
        with DisableTorchFunctionSubclass():
            return torch.Tensor.dim(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and above_split(types):
            return NotImplemented
        rule = _RULES.get(func)
        if rule is None and func not in HANDLERS and inside(func) is None:
            rule = as_plain
        if rule is None or is_tracing() or (Agreement.any_compares and func in HANDLERS):
            return super().__torch_function__(func, types, args, kwargs)
        return rule(func, args, kwargs or {})


def of_one_rank(tile: Tensor, layout: Layout, mesh: Mesh, dims: SpatialDims) -> OneRankTensor:
    """Turn `tile`, a plain tensor, into a split tensor in place; it keeps its graph."""
    tile.__class__ = OneRankTensor
    whole: OneRankTensor = tile  # type: ignore[assignment]
    whole.mesh, whole.spatial_layout, whole.spatial_dims = mesh, layout, dims
    return whole


SpatialTensor.of_one_rank = staticmethod(of_one_rank)


@lru_cache(maxsize=4096)
def _layout_of(samples: int, *size: int) -> Layout:
    return Layout.even(samples, size, (1,) * len(size))


def _split_as(result: Tensor, like: SpatialTensor) -> OneRankTensor:
    """`result`, which has the spatial dims of `like`, as a split tensor."""
    layout, dims = like.spatial_layout, like.spatial_dims
    return of_one_rank(result, layout.of_samples(samples_of(result.shape, dims)), like.mesh, dims)


def _fits(like: SpatialTensor, result: Tensor) -> bool:
    """Whether `result` has the spatial dims of `like` in the same dims."""
    if result.dim() < like.dim():
        return False
    return all(result.shape[dim] == like.shape[dim] for dim in like.spatial_dims.at)


# --- rules


@cache
def _draws(func: Function) -> bool:
    """Whether a function draws random numbers, which depend on the layout without a handler."""
    tags = tags_of(getattr(func, "__name__", ""))
    return any(torch.Tag.nondeterministic_seeded in some for some in tags)


def as_plain(func: Function, args: Any, kwargs: Any) -> Any:
    """Run a function as PyTorch does; results with the spatial dims of an operand are split."""
    if isinstance(func, torch.ScriptMethod):  # refused, as its operations are unknown
        return SpatialTensor.__torch_function__(func, (), args, kwargs)
    if _draws(func):
        raise refusal(func, spatial_in((args, kwargs)))
    if kwargs.get("requires_grad"):
        return as_plain(func, args, {**kwargs, "requires_grad": False}).requires_grad_()
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if type(result) is Tensor:
            return _as_operands(func, result, args, kwargs)
        if isinstance(result, tuple | list):
            for one in result:
                if type(one) is Tensor:
                    _as_operands(func, one, args, kwargs)
    return result


def _as_operands(func: Function, result: Tensor, args: Any, kwargs: Any) -> Tensor:
    first = args[0] if args else None
    if type(first) is OneRankTensor and first.shape == result.shape:
        return of_one_rank(result, first.spatial_layout, first.mesh, first.spatial_dims)
    operands = tree_leaves((args, kwargs))
    is_given = any(result is one for one in operands)
    if is_given and (result is kwargs.get("out") or getattr(func, "__name__", "").endswith("_")):
        return result  # a plain tensor modified in place
    for like in operands:
        if type(like) is OneRankTensor and _fits(like, result):
            return _split_as(result.view_as(result) if is_given else result, like)
    return result


def _on_image(func: Function, args: Any, kwargs: Any) -> Any:
    """Run an operation on (N, C, *spatial) as PyTorch does; errors are left to the handler."""
    x = argument("input", 0, args, kwargs)
    # The handler also computes statistics shared by data replicas.
    if type(x) is OneRankTensor and x.spatial_dims.is_image and StatisticsOver.comm is None:
        dims = x.spatial_dims
        takes = x.dim() == len(dims.at) + 2 and _CONV_DIMS.get(func, len(dims.at)) == len(dims.at)
        with DisableTorchFunctionSubclass():
            y = _try_call(func, args, kwargs) if takes else None
            if y is not None:
                layout = _layout_of(y.shape[0], *y.shape[2:])
                return of_one_rank(y, layout, x.mesh, dims)
    return SpatialTensor.__torch_function__(func, (), args, kwargs)


def _try_call(func: Function, args: Any, kwargs: Any) -> Tensor | None:
    try:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        return None


def _detach(func: Function, args: Any, kwargs: Any) -> Any:
    y, x = as_plain(func, args, kwargs), args[0]
    y._inner = x._inner or x.requires_grad
    return y


def _not_split(func: Function, args: Any, kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _gradient(func: Function, args: Any, kwargs: Any) -> Any:
    grad = _not_split(func, args, kwargs)
    return None if grad is None else _split_gradient(grad, args[0])


def _gradients(func: Function, args: Any, kwargs: Any) -> Any:
    """Run ``torch.autograd.grad``; gradients of split tensors are split."""
    grads = SpatialTensor.__torch_function__(func, (), args, kwargs)
    inputs = argument("inputs", 1, args, kwargs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(
        _split_gradient(grad, x) if type(x) is OneRankTensor and grad is not None else grad
        for grad, x in zip(grads, inputs, strict=True)
    )


def _split_gradient(grad: Tensor, x: SpatialTensor) -> Tensor:
    """A gradient, a plain tensor in PyTorch's operations, split as `x` is."""
    with DisableTorchFunctionSubclass():
        return _split_as(grad.as_subclass(Tensor), x)


def _add_hook(func: Function, args: Any, kwargs: Any) -> Any:
    x, hook = args
    return _not_split(func, (x, lambda grad: hook(_split_gradient(grad, x))), kwargs)


def _refuse(func: Function, args: Any, kwargs: Any) -> Any:
    raise refusal(func, spatial_in((args, kwargs)), "it would move spatial dims in place")


def _register(rule: Rule, *functions: Function) -> None:
    _RULES.update(dict.fromkeys(functions, rule))


_register(
    as_plain,  # these keep the shape
    *functions_of(F, "relu silu sigmoid tanh hardswish hardsigmoid relu6 leaky_relu elu selu mish"),
    *functions_of(F, "hardtanh layer_norm softmax log_softmax"),
    *functions_of(torch, "softmax log_softmax"),
    *functions_of(Tensor, "softmax log_softmax"),
)
_register(_on_image, F.batch_norm, torch.batch_norm, F.group_norm, F.instance_norm)
_register(_on_image, *_CONV_DIMS)
_register(_detach, Tensor.detach, torch.detach, getter("data"))
_register(_not_split, getter("_base"))
_register(_gradient, getter("grad"))
_register(_gradients, torch.autograd.grad)
_register(_add_hook, Tensor.register_hook)
_register(
    _refuse,
    *functions_of(Tensor, "unsqueeze_ squeeze_ transpose_ t_ swapaxes_ swapdims_"),
    *functions_of(Tensor, "resize_ resize_as_ set_ as_strided_"),
)
