"""Transposed convolution on a split image.

An output reads the few input pixels whose kernels reach it. Pixels outside the image contribute
nothing, so the box that a rank needs lies inside the image. With kernel and stride 2 it is the own
tile, and nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.layout.layout import Box, Layout, Window, by, transposed_boxes
from spatialdl.spatial.autocast import autocast_cast
from spatialdl.spatial.tensor import SpatialTensor, from_tile, register_op, to_tile
from spatialdl.spatial.window import WindowMove, check_image, per_dim, windows_of
from spatialdl.spatial.window_function import (
    Convolution,
    Gradients,
    Needs,
    apply_to_window,
    per_channel,
    stride_for,
)

_FORWARD: dict[int, Any] = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}


@dataclass(frozen=True)
class TransposedConvolution(Convolution):
    """The `WindowFunction` of a transposed convolution of a rank's inputs.

    Attributes:
        padding: as in PyTorch, crops outputs at both ends: those not needed by this rank.
        fit: pads as for `F.pad`, last dim first: zeros for outputs without inputs to add before and
            after, or, if negative, outputs to crop.
    """

    fit: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"conv_transpose{len(self.stride)}d"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outside = max(self.fit) > 0  # outputs without inputs have a bias too
        y: Tensor = _FORWARD[len(self.stride)](
            x,
            weight,
            None if outside else bias,
            self.stride,
            self.padding,
            0,
            self.groups,
            self.dilation,
        )
        if any(self.fit):
            y = F.pad(y, self.fit)
        return y + per_channel(bias, y) if outside and bias is not None else y

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: Needs) -> Gradients:
        if any(self.fit):
            grad = F.pad(grad, tuple(-count for count in self.fit))
        stride = stride_for(x.shape[-1], self.stride, x)
        return self.gradients(grad, x, weight, needs, stride, transposed=True)


def _fit(need: tuple[int, int], output: tuple[int, int], window: Window) -> tuple[int, int, int]:
    """Padding for one dim, and the remaining pads before and after the outputs."""
    first = need[0] * window.stride - window.padding
    last = (need[1] - 1) * window.stride - window.padding + window.reach
    before, after = first - output[0], output[1] - last
    padding = max(0, min(-before, -after))
    return padding, before + padding, after + padding


@lru_cache(maxsize=4096)
def transposed_move(
    layout: Layout, windows: tuple[Window, ...], size: tuple[int, ...], part: int
) -> WindowMove:
    """The move for a transposed convolution of an image on `layout` to an output of `size`."""
    output = layout.scaled([window.stride for window in windows], size)
    needed = transposed_boxes(layout, output, windows)
    return WindowMove(output, plan_for(layout.boxes, needed, part))


def _local(plan: Plan, own: Box, windows: tuple[Window, ...], groups: int) -> TransposedConvolution:
    """The computation of this rank for its output box `own`."""
    fits = [(0, 0, 0)] * len(windows)
    if not plan.need.is_empty:
        fits = list(map(_fit, plan.need.spatial, own.spatial, windows))
    return TransposedConvolution(
        tuple(window.stride for window in windows),
        tuple(window.dilation for window in windows),
        groups,
        tuple(padding for padding, _, _ in fits),
        tuple(count for _, *ends in reversed(fits) for count in ends),
    )


def _check(
    x: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    extra: tuple[int, ...],
    windows: tuple[Window, ...],
) -> None:
    """Raise PyTorch's errors before any communication."""
    name = f"conv_transpose{len(extra)}d"
    check_image(name, x, len(extra))
    if weight.dim() != x.dim() or x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"{name}: the image has {x.shape[1]} channels, but the weight is "
            f"{tuple(weight.shape)}; its first dim must be the channels"
        )
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"{name}: {x.shape[1]} channels cannot be divided into {groups} groups")
    channels = weight.shape[1] * groups
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"{name}: the bias must have shape ({channels},), got {tuple(bias.shape)}")
    for window, more in zip(windows, extra, strict=True):
        if not 0 <= more < max(window.stride, window.dilation):
            raise ValueError(
                f"{name}: output padding must be at least 0 and smaller than stride or dilation, "
                f"got output padding {more}, stride {window.stride}, dilation {window.dilation}"
            )


def _register(function: Any, dims: int) -> None:
    @register_op(function, split=("input",))  # F.conv_transpose2d is the same function
    def conv_transpose(
        input: SpatialTensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        extra = per_dim(output_padding, dims)
        name = f"conv_transpose{dims}d"
        windows = windows_of(name, dims, weight.shape[2:], stride, padding, dilation)
        _check(input, weight, bias, groups, extra, windows)
        size = tuple(
            window.transposed_size(pixels, more)
            for window, pixels, more in zip(windows, input.shape[2:], extra, strict=True)
        )
        if min(size) < 1:
            raise ValueError(
                f"{name}: input {tuple(input.shape)} gives an output of {by(size)} pixels; "
                "use less padding or larger images"
            )
        mesh = input.mesh
        output, plan = transposed_move(input.spatial_layout, windows, size, mesh.part)
        own = mesh.own_box(output)
        samples, *extents = own.shape
        shape = (samples, weight.shape[1] * groups, *extents)
        tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
        local = _local(plan, own, windows, groups)
        y = apply_to_window(local, shape, tile, weight, bias, plan, mesh)
        return from_tile(y, output, mesh)


for _dims, _function in _FORWARD.items():
    _register(_function, _dims)
