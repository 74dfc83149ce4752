"""Functions of a window and a weight: convolutions and transposed ones of copied pixels.

The tile is copied together with its halo. Saved for backward are the tile, which the network keeps
anyway, and the halo, not the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import (
    copy_kept,
    move_back,
    repartition,
    room_for_window,
    view_of,
)
from spatialdl.layout.layout import Box
from spatialdl.spatial.autocast import HALF
from spatialdl.spatial.window import empty_output, holds_all, read_window


def per_channel(bias: Tensor, like: Tensor) -> Tensor:
    """A bias per channel, shaped for addition to an image such as `like`."""
    return bias.view(1, -1, *(1,) * (like.dim() - 2))


def bias_gradient(grad: Tensor) -> Tensor:
    """The gradient of a bias per channel, from that of the image."""
    return grad.sum([0, *range(2, grad.dim())])


def stride_for(columns: int, stride: tuple[int, ...], x: Tensor) -> tuple[int, ...]:
    """The strides to pass to PyTorch, if the strided side has `columns` pixels in the last dim.

    With one column, as in halo strips, the last stride has no effect, but oneDNN's AMX kernels are
    wrong with it in half precision (PyTorch 2.13 and before; pytorch/pytorch#169688).
    """
    if columns == 1 and stride[-1] > 1 and x.dtype in HALF and x.device.type == "cpu":
        return (*stride[:-1], 1)
    return stride


class WindowFunction(Protocol):
    """The computation of one rank; not called for empty windows or empty outputs."""

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        """The shape of the outputs: samples, channels, spatial dims."""
        ...

    def forward(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def backward(
        self, grad: Tensor, window: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of window and weight that are needed."""
        ...


def apply_to_window(
    function: WindowFunction,
    tile: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    mesh: Mesh,
    name: str,
) -> Tensor:
    """The outputs of this rank, with inputs fetched by `plan`.

    For complex tensors the window is saved, as PyTorch composes their backward of real operations.
    """
    if tile.is_complex():
        window = repartition(tile, mesh.grid_comm, plan, name=name)
        return _outputs(function, window, weight, bias)
    y: Tensor = _WindowFunction.apply(function, tile, weight, bias, plan, mesh, name)  # type: ignore[no-untyped-call]
    return y


def _outputs(
    function: WindowFunction, window: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    shape = function.shape(weight)
    if window.numel() > 0 and 0 not in shape:
        return function.forward(window, weight, bias)
    y = empty_output(shape, window, weight).zero_()
    return y if bias is None else y + per_channel(bias, y)


class _WindowFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: WindowFunction,
        tile: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        mesh: Mesh,
        name: str,
    ) -> Tensor:
        window = read_window(tile, mesh, plan, name)
        ctx.function, ctx.plan, ctx.mesh, ctx.name = function, plan, mesh, name
        ctx.window_shape = window.shape
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(weight, tile, _arrived(window, plan))
        else:
            ctx.save_for_backward(weight)
        return _outputs(function, window, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        _, needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        if needs_weight:
            tile, others = inputs
            window = _window_again(tile, others, ctx.plan)
        else:
            window = grad.new_empty(()).expand(ctx.window_shape)  # values are not read
        if window.numel() > 0 and grad.numel() > 0:
            needs = (needs_tile, needs_weight)
            grad_window, grad_weight = ctx.function.backward(grad, window, weight, needs)
        else:
            grad_window, grad_weight = torch.zeros_like(window), torch.zeros_like(weight)
        grad_tile = None
        if needs_tile:
            grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, ctx.name)
        grad_bias = bias_gradient(grad) if needs_bias else None
        return None, grad_tile, grad_weight if needs_weight else None, grad_bias, None, None, None


def _arrived(window: Tensor, plan: Plan) -> Tensor:
    """The pixels of a window received from other ranks, in one flat tensor.

    One tensor, so that all ranks save equally many.
    """
    pieces = [view_of(window, plan.need, piece.box).reshape(-1) for piece in plan.receives]
    return torch.cat(pieces) if pieces else window.new_empty(0)


def _window_again(tile: Tensor, others: Tensor, plan: Plan) -> Tensor:
    """The window of `read_window`, rebuilt from the tile and the pixels of `_arrived`."""
    if holds_all(plan):
        return view_of(tile, plan.own, plan.need)
    window = room_for_window(tile, plan)
    copy_kept(tile, window, plan)
    sizes = [view_of(window, plan.need, piece.box).numel() for piece in plan.receives]
    for piece, values in zip(plan.receives, torch.split(others, sizes), strict=True):
        target = view_of(window, plan.need, piece.box)
        target.copy_(values.view(target.shape))
    return window


# --- convolution of tiles without pixels or outputs, and of weights larger than a tile, for which
# copying the tile costs less than copying kernel taps


aten = torch.ops.aten

_FORWARD: dict[int, Any] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def _none(like: tuple[int, ...]) -> tuple[int, ...]:
    """Zero padding for as many dims."""
    return (0,) * len(like)


@dataclass(frozen=True)
class Convolution:
    """The parameters of a convolution that do not depend on the rank."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def name(self) -> str:
        return f"conv{len(self.stride)}d"

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]
    ) -> Tensor:
        function = _FORWARD[len(self.stride)]
        reach = self.dilation[-1] * (weight.shape[-1] - 1) + 1
        columns = (x.shape[-1] + 2 * padding[-1] - reach) // self.stride[-1] + 1
        stride = stride_for(columns, self.stride, x)
        y: Tensor = function(x, weight, bias, stride, padding, self.dilation, self.groups)
        return y if stride == self.stride else y[..., :1].contiguous()

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, ...],
        mask: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias that `mask` selects."""
        if not any(mask):
            return None, None, None
        grads: tuple[Tensor | None, Tensor | None, Tensor | None] = aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            padding,
            self.dilation,
            False,
            _none(self.stride),
            self.groups,
            mask,
        )
        return grads


@dataclass(frozen=True)
class _WindowConvolution:
    """The `WindowFunction` of the outputs in the box `own`."""

    conv: Convolution
    own: Box

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        samples, *spatial = self.own.shape
        return samples, weight.shape[0], *spatial

    def forward(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.conv.forward(window, weight, bias, _none(self.conv.stride))

    def backward(
        self, grad: Tensor, window: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        padding = _none(self.conv.stride)
        return self.conv.backward(grad, window, weight, padding, (*needs, False))[:2]


def conv_of_window(
    tile: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Convolution,
    own: Box,
    plan: Plan,
    mesh: Mesh,
) -> Tensor:
    """The outputs in the box `own`, with inputs fetched by `plan`."""
    function = _WindowConvolution(conv, own)
    return apply_to_window(function, tile, weight, bias, plan, mesh, conv.name)
