"""Convolution of a tile that was copied together with its halo.

Used for tiles without pixels or outputs, which `conv` does not support, and for weights larger
than a tile: then copying the tile costs less than copying kernel taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan
from spatialdl.parallel.layout import Box
from spatialdl.spatial.window_function import apply_to_window, stride_for

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
