"""Convolution of a tile that was copied together with its halo.

The fallback for tiles that are too odd for `conv`: without pixels, or without outputs. What it
keeps for backward is the tile and what came from other ranks, not the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move_back, repartition
from spatialdl.layout import Box
from spatialdl.mesh import Mesh
from spatialdl.spatial.window import arrived, nothing, read_window, window_again

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """What does not depend on the rank: strides, dilations, groups."""

    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        return torch.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, int],
        mask: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias, as `mask` asks for."""
        grads: tuple[Tensor | None, Tensor | None, Tensor | None] = aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            mask,
        )
        return grads


class _WindowConvolution(torch.autograd.Function):
    """Keeps the tile, which the network keeps anyhow, and the pixels of other ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv: Convolution,
        own: Box,
        plan: Plan,
        mesh: Mesh,
    ) -> Tensor:
        window = read_window(tile, mesh, plan, "conv2d")
        ctx.conv, ctx.plan, ctx.mesh, ctx.window_shape = conv, plan, mesh, window.shape
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight, tile, arrived(window, plan))
        else:
            ctx.save_for_backward(weight)
        if own.is_empty:
            return window.new_empty(_output_shape(weight, own))
        return conv.forward(window, weight, bias, (0, 0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_weight:
            tile, others = inputs
            window = window_again(tile, others, ctx.plan)
        else:
            window = grad.new_empty(()).expand(ctx.window_shape)  # only its shape counts
        grad_window: Tensor | None = torch.zeros_like(window)
        grad_weight: Tensor | None = torch.zeros_like(weight)
        grad_bias = grad.sum((0, 2, 3)) if needs_bias else None
        if grad.numel() > 0 and (needs_tile or needs_weight):
            grad_window, grad_weight, _ = ctx.conv.backward(
                grad, window, weight, (0, 0), (needs_tile, needs_weight, False)
            )
        grad_tile = None
        if needs_tile and grad_window is not None:
            grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, "conv2d")
        return grad_tile, grad_weight if needs_weight else None, grad_bias, *(None,) * 4


def conv_of_window(
    tile: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Convolution,
    own: Box,
    plan: Plan,
    mesh: Mesh,
) -> Tensor:
    """The outputs in the box `own`, of which `plan` brings all that they read."""
    if tile.is_complex():
        return _differentiated_by_pytorch(tile, weight, bias, conv, own, plan, mesh)
    y: Tensor = _WindowConvolution.apply(tile, weight, bias, conv, own, plan, mesh)  # type: ignore[no-untyped-call]
    return y


def _differentiated_by_pytorch(
    tile: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Convolution,
    own: Box,
    plan: Plan,
    mesh: Mesh,
) -> Tensor:
    """For complex numbers, whose backward PyTorch puts together from real ones.

    Keeps the window.
    """
    window = repartition(tile, mesh.grid_comm, plan, name="conv2d")
    if own.is_empty:
        inputs = (window, weight) if bias is None else (window, weight, bias)
        return nothing(_output_shape(weight, own), *inputs)
    return conv.forward(window, weight, bias, (0, 0))


def _output_shape(weight: Tensor, own: Box) -> tuple[int, int, int, int]:
    samples, height, width = own.shape
    return samples, weight.shape[0], height, width
