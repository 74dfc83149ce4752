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
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.table import HANDLERS, refusal, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, above_split
from spatialdl.torch_internals import (
    DisableTorchFunctionSubclass,
    OpOverloadPacket,
    disabled_torch_dispatch,
    is_tracing,
    tree_leaves,
)

Function = Callable[..., Any]
Rule = Callable[[Function, Any, Any], Any]
_RULES: dict[Function, Rule] = {}
_CONV_DIMS: dict[Function, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class WholeTensor(SpatialTensor):
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


def of_one_rank(tile: Tensor, layout: Layout, mesh: Mesh, dims: SpatialDims) -> WholeTensor:
    """Turn `tile`, a plain tensor, into a split tensor in place; it keeps its graph."""
    tile.__class__ = WholeTensor
    whole: WholeTensor = tile  # type: ignore[assignment]
    whole.mesh, whole.spatial_layout, whole.spatial_dims = mesh, layout, dims
    return whole


SpatialTensor.of_one_rank = staticmethod(of_one_rank)


@lru_cache(maxsize=4096)
def _layout_of(samples: int, *size: int) -> Layout:
    return Layout.even(samples, size, (1,) * len(size))


def _split_as(result: Tensor, like: SpatialTensor) -> WholeTensor:
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
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


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
    if type(first) is WholeTensor and first.shape == result.shape:
        return of_one_rank(result, first.spatial_layout, first.mesh, first.spatial_dims)
    operands = tree_leaves((args, kwargs))
    is_given = any(result is one for one in operands)
    if is_given and (result is kwargs.get("out") or getattr(func, "__name__", "").endswith("_")):
        return result  # a plain tensor modified in place
    for like in operands:
        if type(like) is WholeTensor and _fits(like, result):
            return _split_as(result.view_as(result) if is_given else result, like)
    return result


def _on_image(func: Function, args: Any, kwargs: Any) -> Any:
    """Run an operation on (N, C, *spatial) as PyTorch does; errors are left to the handler."""
    x = args[0] if args else kwargs.get("input")
    # The handler also computes statistics shared by data replicas.
    if type(x) is WholeTensor and x.spatial_dims.is_image and StatisticsOver.comm is None:
        dims = x.spatial_dims
        takes = x.dim() == len(dims.at) + 2 and _CONV_DIMS.get(func, len(dims.at)) == len(dims.at)
        with DisableTorchFunctionSubclass():
            y = _tried(func, args, kwargs) if takes else None
            if y is not None:
                layout = _layout_of(y.shape[0], *y.shape[2:])
                return of_one_rank(y, layout, x.mesh, dims)
    return SpatialTensor.__torch_function__(func, (), args, kwargs)


def _tried(func: Function, args: Any, kwargs: Any) -> Tensor | None:
    try:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        return None


def _detached(func: Function, args: Any, kwargs: Any) -> Any:
    y, x = as_plain(func, args, kwargs), args[0]
    y._inner = x._inner or x.requires_grad
    return y


def _not_split(func: Function, args: Any, kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _gradient(func: Function, args: Any, kwargs: Any) -> Any:
    grad = _not_split(func, args, kwargs)
    return None if grad is None else _seen_as(grad, args[0])


def _gradients(func: Function, args: Any, kwargs: Any) -> Any:
    """Run ``torch.autograd.grad``; gradients of split tensors are split."""
    grads = SpatialTensor.__torch_function__(func, (), args, kwargs)
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(
        _seen_as(grad, x) if type(x) is WholeTensor and grad is not None else grad
        for grad, x in zip(grads, inputs, strict=True)
    )


def _seen_as(grad: Tensor, x: SpatialTensor) -> Tensor:
    """A gradient, a plain tensor in PyTorch's operations, split as `x` is."""
    with DisableTorchFunctionSubclass():
        return _split_as(grad.as_subclass(Tensor), x)


def _hooked(func: Function, args: Any, kwargs: Any) -> Any:
    x, hook = args
    return _not_split(func, (x, lambda grad: hook(_seen_as(grad, x))), kwargs)


def _refused(func: Function, args: Any, kwargs: Any) -> Any:
    raise refusal(func, spatial_in((args, kwargs)), "it would move spatial dims in place")


def _getter(name: str) -> Function:
    """The function that reads a property of a tensor."""
    return getattr(Tensor, name).__get__  # type: ignore[no-any-return]


def _register(rule: Rule, *functions: Function) -> None:
    _RULES.update(dict.fromkeys(functions, rule))


_register(
    as_plain,  # these keep the shape
    *(F.relu, F.silu, F.sigmoid, F.tanh, F.hardswish, F.hardsigmoid, F.relu6, F.leaky_relu),
    *(F.elu, F.selu, F.mish, F.hardtanh, F.layer_norm),
    *(F.softmax, torch.softmax, Tensor.softmax),
    *(F.log_softmax, torch.log_softmax, Tensor.log_softmax),
)
_register(_on_image, F.batch_norm, torch.batch_norm, F.group_norm, F.instance_norm)
_register(_on_image, *_CONV_DIMS)
_register(_detached, Tensor.detach, torch.detach, _getter("data"))
_register(_not_split, _getter("_base"))
_register(_gradient, _getter("grad"))
_register(_gradients, torch.autograd.grad)
_register(_hooked, Tensor.register_hook)
_register(
    _refused,
    *(Tensor.unsqueeze_, Tensor.squeeze_, Tensor.transpose_, Tensor.t_, Tensor.swapaxes_),
    *(Tensor.swapdims_, Tensor.resize_, Tensor.resize_as_, Tensor.set_, Tensor.as_strided_),
)
