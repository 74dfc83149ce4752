"""Functions of a window and a weight: convolutions and transposed ones of copied pixels.

The tile is copied together with its halo. Saved for backward are the tile, which the network keeps
anyway, and the halo, not the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


Needs = tuple[bool, bool, bool]
"""Whether the gradients of input, weight and bias are needed."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Those of input, weight and bias that are needed."""


class WindowFunction(Protocol):
    """The computation of one rank; not called for empty windows or empty outputs."""

    @property
    def name(self) -> str:
        """The operation, for messages."""
        ...

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: Needs) -> Gradients: ...


def apply_to_window(
    function: WindowFunction,
    shape: tuple[int, ...],
    tile: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    mesh: Mesh,
) -> Tensor:
    """The outputs of this rank, of `shape`, with inputs fetched by `plan`.

    For complex tensors the window is saved, as PyTorch composes their backward of real operations.
    """
    if tile.is_complex():
        window = repartition(tile, mesh.grid_comm, plan, name=function.name)
        return _outputs(function, shape, window, weight, bias)
    y: Tensor = _WindowFunction.apply(function, shape, tile, weight, bias, plan, mesh)  # type: ignore[no-untyped-call]
    return y


def _outputs(
    function: WindowFunction,
    shape: tuple[int, ...],
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    if window.numel() > 0 and 0 not in shape:
        return function.forward(window, weight, bias)
    y = empty_output(shape, window, weight).zero_()
    return y if bias is None else y + per_channel(bias, y)


class _WindowFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: WindowFunction,
        shape: tuple[int, ...],
        tile: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        mesh: Mesh,
    ) -> Tensor:
        window = read_window(tile, mesh, plan, function.name)
        ctx.function, ctx.plan, ctx.mesh = function, plan, mesh
        ctx.window_shape = window.shape
        if ctx.needs_input_grad[3]:
            ctx.save_for_backward(weight, tile, _received_pixels(window, plan))
        else:
            ctx.save_for_backward(weight)
        return _outputs(function, shape, window, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        if needs_weight:
            tile, others = inputs
            window = _rebuild_window(tile, others, ctx.plan)
        else:
            window = grad.new_empty(()).expand(ctx.window_shape)  # values are not read
        if window.numel() > 0 and grad.numel() > 0:
            needs = (needs_tile, needs_weight, False)
            grad_window, grad_weight, _ = ctx.function.backward(grad, window, weight, needs)
        else:
            grad_window, grad_weight = torch.zeros_like(window), torch.zeros_like(weight)
        grad_tile = None
        if needs_tile:
            grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, ctx.function.name)
        grad_bias = bias_gradient(grad) if needs_bias else None
        return None, None, grad_tile, grad_weight if needs_weight else None, grad_bias, None, None


def _received_pixels(window: Tensor, plan: Plan) -> Tensor:
    """The pixels of a window received from other ranks, in one flat tensor.

    One tensor, so that all ranks save equally many.
    """
    pieces = [view_of(window, plan.need, piece.box).reshape(-1) for piece in plan.receives]
    return torch.cat(pieces) if pieces else window.new_empty(0)


def _rebuild_window(tile: Tensor, others: Tensor, plan: Plan) -> Tensor:
    """The window of `read_window`, rebuilt from the tile and the pixels of `_received_pixels`."""
    if holds_all(plan):
        return view_of(tile, plan.own, plan.need)
    window = room_for_window(tile, plan)
    copy_kept(tile, window, plan)
    sizes = [view_of(window, plan.need, piece.box).numel() for piece in plan.receives]
    for piece, values in zip(plan.receives, torch.split(others, sizes), strict=True):
        target = view_of(window, plan.need, piece.box)
        target.copy_(values.view(target.shape))
    return window


# --- convolutions


aten = torch.ops.aten

_FORWARD: dict[int, Any] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Convolution:
    """The `WindowFunction` of a convolution of a rank's inputs, with zeros around them."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"conv{len(self.stride)}d"

    @property
    def without_padding(self) -> Convolution:
        return replace(self, padding=(0,) * len(self.padding))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = _FORWARD[len(self.stride)]
        reach = self.dilation[-1] * (weight.shape[-1] - 1) + 1
        columns = (x.shape[-1] + 2 * self.padding[-1] - reach) // self.stride[-1] + 1
        stride = stride_for(columns, self.stride, x)
        y: Tensor = function(x, weight, bias, stride, self.padding, self.dilation, self.groups)
        return y if stride == self.stride else y[..., :1].contiguous()

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: Needs) -> Gradients:
        return self.gradients(grad, x, weight, needs, self.stride)

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        needs: Needs,
        stride: tuple[int, ...],
        transposed: bool = False,
    ) -> Gradients:
        if not any(needs):
            return None, None, None
        grads: Gradients = aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.shape[0]] if needs[2] else None,
            stride,
            self.padding,
            self.dilation,
            transposed,
            (0,) * len(stride),
            self.groups,
            needs,
        )
        return grads
