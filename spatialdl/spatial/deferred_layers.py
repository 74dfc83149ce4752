"""Convolutions and linear layers with deferred weight gradients, see `deferred_gradients`.

PyTorch's own operations compute both gradients at once. `DeferWeightGradients` replaces them by
operations with equal results; cases that these do not support keep PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spatialdl.random.composite import inside
from spatialdl.spatial.deferred_gradients import can_be_deferred, deferred
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import are_functorch_transforms_active

aten = torch.ops.aten

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_WITH_LAYERS_INSIDE = (F.multi_head_attention_forward,)
_PLAIN = (Tensor, nn.Parameter)


class DeferWeightGradients(TorchFunctionMode):
    """A mode in which weight gradients can be deferred, for plain tensors and tiles.

    Enter it for forward, and for backward if parts of the network are recomputed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:  # PyTorch disables this mode here, but recomputation needs it
                return (inside(func) or func)(*args, **kwargs)
        apart = _APART.get(func)
        if apart is None and func not in _WITH_LAYERS_INSIDE:
            return func(*args, **kwargs)
        if any(issubclass(kind, SpatialTensor) for kind in types):
            with self:  # for the tile
                return SpatialTensor.__torch_function__(func, types, args, kwargs)
        if apart is None:
            with self:
                return (inside(func) or func)(*args, **kwargs)
        y = apart(*args, **kwargs) if torch.is_grad_enabled() else None
        return func(*args, **kwargs) if y is None else y


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operands are supported: plain strided tensors of one dtype and device."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    kind = input.device.type if isinstance(input, Tensor) else "cpu"
    return (
        all(type(one) in _PLAIN and one.layout == torch.strided for one in tensors)
        and all(one.dtype == weight.dtype and one.device == weight.device for one in tensors)
        and weight.is_floating_point()
        and can_be_deferred(weight)
        and not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
        and not are_functorch_transforms_active()
    )


# --- linear layers


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])

        def grad_weight() -> Tensor:
            return torch.matmul(rows.t(), x.reshape(-1, x.shape[-1]))

        return (
            grad @ weight if needs_x else None,
            _now_or_later(ctx.parameter, (rows, x), grad_weight),
            rows.sum(0) if needs_bias else None,
        )


def _now_or_later(
    parameter: Tensor, kept: Sequence[Tensor], compute: Callable[[], Tensor]
) -> Tensor | None:
    waiting = deferred(parameter)
    if waiting is None:
        return compute()
    waiting.leave(parameter, kept, compute)
    return None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not _fits(input, weight, bias) or weight.dim() != 2:
        return None
    y: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return y


# --- convolutions


class _Settings(NamedTuple):
    """The arguments of `aten.convolution` after the tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.settings = weight, settings
        y: Tensor = aten.convolution(x, weight, bias, *settings)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        sums = [grad.shape[1]]

        def backward(*mask: bool) -> tuple[Tensor, Tensor, Tensor]:
            grads: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
                grad, x, weight, sums, *ctx.settings, mask
            )
            return grads

        waiting = deferred(ctx.parameter)
        if waiting is None:
            return (*backward(needs_x, True, needs_bias), None)
        waiting.leave(ctx.parameter, (grad, x), lambda: backward(False, True, False)[1])
        # Not by `backward`, which would compute the weight gradient for it.
        grad_bias = grad.sum([dim for dim in range(grad.dim()) if dim != 1]) if needs_bias else None
        return backward(True, False, False)[0] if needs_x else None, None, grad_bias, None


def _convolution(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Tensor | None:
    if not _fits(input, weight, bias) or not input.dim() == weight.dim() == dims + 2:
        return None
    if isinstance(padding, str):
        return None
    steps, zeros, spread, extra = (
        [one] * dims if isinstance(one, int) else list(one)
        for one in (stride, padding, dilation, output_padding)
    )
    settings = _Settings(steps, zeros, spread, transposed, extra, groups)
    y: Tensor = _Convolution.apply(input, weight, bias, settings)  # type: ignore[no-untyped-call]
    return y


def _transposed(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    options = (stride, padding, dilation, groups, True, output_padding)
    return _convolution(dims, input, weight, bias, *options)


_APART: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.conv1d: partial(_convolution, 1),
    torch.conv2d: partial(_convolution, 2),
    torch.conv3d: partial(_convolution, 3),
    torch.conv_transpose1d: partial(_transposed, 1),
    torch.conv_transpose2d: partial(_transposed, 2),
    torch.conv_transpose3d: partial(_transposed, 3),
}
