"""Convolution of a tile that was copied together with its halo.

For tiles that are too odd for `conv` (without pixels, or without outputs), and where the weight is
larger than a tile, so that a copy of the tile costs less than one of the taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan
from spatialdl.layout import Box
from spatialdl.mesh import Mesh
from spatialdl.spatial.window_function import apply_to_window

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
            (0, 0),
            self.groups,
            mask,
        )
        return grads


@dataclass(frozen=True)
class _WindowConvolution:
    """A `WindowFunction`: the outputs in the box `own`."""

    conv: Convolution
    own: Box

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        samples, height, width = self.own.shape
        return samples, weight.shape[0], height, width

    def forward(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.conv.forward(window, weight, bias, (0, 0))

    def backward(
        self, grad: Tensor, window: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.conv.backward(grad, window, weight, (0, 0), (*needs, False))[:2]


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
    function = _WindowConvolution(conv, own)
    return apply_to_window(function, tile, weight, bias, plan, mesh, "conv2d")
