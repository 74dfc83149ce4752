"""Transposed convolution on a split image.

An output reads the few input pixels whose kernels reach it. Pixels outside the image give nothing,
so what a rank needs never lies outside. With kernel and stride 2 it is the own tile, and no rank
talks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.layout import Box, Layout, Window, transposed_boxes
from spatialdl.spatial.tensor import SpatialTensor, from_tile, register_op, to_tile
from spatialdl.spatial.window import autocast_cast, check_image, pair
from spatialdl.spatial.window_function import apply_to_window

aten = torch.ops.aten


@dataclass(frozen=True)
class TransposedConvolution:
    """A `WindowFunction`: transposed convolution of the pixels that a rank has read.

    Attributes:
        padding: cuts outputs off both ends (PyTorch's meaning), as many as no rank misses.
        fit: columns before and after, rows before and after, that are still to be added (without
            any input: zeros) or, if negative, cut off; as `F.pad` takes them.
        output: the outputs wanted: samples, rows, columns.
    """

    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    padding: tuple[int, int]
    fit: tuple[int, int, int, int]
    output: tuple[int, int, int]

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        samples, height, width = self.output
        return samples, weight.shape[1] * self.groups, height, width

    def forward(self, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outside = max(self.fit) > 0  # outputs that read nothing have a bias all the same
        y = torch.conv_transpose2d(
            window,
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
        return y + bias.view(1, -1, 1, 1) if outside and bias is not None else y

    def backward(
        self, grad: Tensor, window: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not any(needs):
            return None, None
        if any(self.fit):
            grad = F.pad(grad, tuple(-count for count in self.fit))
        grad_window, grad_weight, _ = aten.convolution_backward(
            grad,
            window,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            True,
            (0, 0),
            self.groups,
            (*needs, False),
        )
        return grad_window, grad_weight


def _fit(need: tuple[int, int], output: tuple[int, int], window: Window) -> tuple[int, int, int]:
    """Padding for one dim, and what is then to be added before and after the outputs."""
    first = need[0] * window.stride - window.padding
    last = (need[1] - 1) * window.stride - window.padding + window.reach
    before, after = first - output[0], output[1] - last
    padding = max(0, min(-before, -after))
    return padding, before + padding, after + padding


class TransposedMove(NamedTuple):
    """The layout of the output, and the plan that brings what it reads."""

    output: Layout
    plan: Plan


@lru_cache(maxsize=4096)
def transposed_move(
    layout: Layout, rows: Window, cols: Window, size: tuple[int, int], part: int
) -> TransposedMove:
    output = layout.scaled((rows.stride, cols.stride), size)
    needed = transposed_boxes(layout, output, rows, cols)
    return TransposedMove(output, plan_for(layout.boxes, needed, part))


def _local(plan: Plan, own: Box, rows: Window, cols: Window, groups: int) -> TransposedConvolution:
    """What this rank computes for its box `own` of the output."""
    need = plan.need
    top = left = (0, 0, 0)
    if not need.is_empty:
        top = _fit((need.row0, need.row1), (own.row0, own.row1), rows)
        left = _fit((need.col0, need.col1), (own.col0, own.col1), cols)
    padding, fit = (top[0], left[0]), (*left[1:], *top[1:])
    steps, spread = (rows.stride, cols.stride), (rows.dilation, cols.dilation)
    return TransposedConvolution(steps, spread, groups, padding, fit, own.shape)


def _check(
    x: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    extra: tuple[int, int],
    windows: tuple[Window, Window],
) -> None:
    """What PyTorch refuses is refused before any rank talks."""
    check_image("conv_transpose2d", x)
    if weight.dim() != 4 or x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"conv_transpose2d: the image has {x.shape[1]} channels, but the weight is "
            f"{tuple(weight.shape)}; its first dim must be the channels"
        )
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(
            f"conv_transpose2d: {x.shape[1]} channels cannot be cut into {groups} groups"
        )
    channels = weight.shape[1] * groups
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(
            f"conv_transpose2d: the bias must have shape ({channels},), got {tuple(bias.shape)}"
        )
    for window, more in zip(windows, extra, strict=True):
        if min(window.padding, more) < 0 or min(window.stride, window.dilation) < 1:
            raise ValueError(
                "conv_transpose2d: stride and dilation must be at least 1, padding and output "
                f"padding at least 0; got {windows} and output padding {extra}"
            )
        if more >= max(window.stride, window.dilation):
            raise ValueError(
                f"conv_transpose2d: output padding must be smaller than stride or dilation, got "
                f"output padding {more}, stride {window.stride}, dilation {window.dilation}"
            )


@register_op(torch.conv_transpose2d, split=("input",))  # F.conv_transpose2d is the same function
def conv_transpose2d(
    input: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    extra = pair(output_padding)
    kernel, values = weight.shape[2:], (pair(stride), pair(padding), pair(dilation))
    rows, cols = (Window(int(k), *v) for k, *v in zip(kernel, *values, strict=True))
    _check(input, weight, bias, groups, extra, (rows, cols))
    size = (
        rows.transposed_size(input.shape[-2], extra[0]),
        cols.transposed_size(input.shape[-1], extra[1]),
    )
    if min(size) < 1:
        raise ValueError(
            f"conv_transpose2d: input {tuple(input.shape)} gives an output of {size[0]}x{size[1]} "
            "pixels; use less padding or larger images"
        )
    mesh = input.mesh
    output, plan = transposed_move(input.spatial_layout, rows, cols, size, mesh.part)
    local = _local(plan, mesh.own_box(output), rows, cols, groups)
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    y = apply_to_window(local, tile, weight, bias, plan, mesh, "conv_transpose2d")
    return from_tile(y, output, mesh)
