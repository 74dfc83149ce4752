"""Max and average pooling with a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move, move_back, repartition
from spatialdl.layout import Window
from spatialdl.mesh import Mesh
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile
from spatialdl.spatial.window import (
    WindowMove,
    check_image,
    check_output,
    nothing,
    pair,
    window_move,
)


def _windows(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Window, Window]:
    kernel = pair(kernel_size)
    step = pair(stride) if stride not in (None, [], ()) else kernel
    rows, cols = (
        Window(*values) for values in zip(kernel, step, pair(padding), pair(dilation), strict=True)
    )
    for window in (rows, cols):
        if window.padding > window.kernel // 2:
            raise ValueError(
                f"pooling: padding {window.padding} is more than half of the kernel {window.kernel}"
            )
    return rows, cols


def _move_for(
    name: str, x: SpatialTensor, rows: Window, cols: Window, ceil_mode: bool
) -> WindowMove:
    check_image(name, x)
    size = (
        rows.output_size(x.shape[-2], ceil_mode),
        cols.output_size(x.shape[-1], ceil_mode),
    )
    check_output(name, x, size)
    return window_move(x.spatial_layout, rows, cols, size, x.mesh.part)


class _MaxPool(torch.autograd.Function):
    """Keeps the indices only: the tile with its halo does not outlive the call."""

    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, mesh: Mesh, plan: Plan, rows: Window, cols: Window
    ) -> Tensor:
        window = move(mesh.grid_comm, plan, tile, _lowest(tile.dtype), "max_pool2d")
        ctx.call = _pool_arguments(rows, cols)
        ctx.mesh, ctx.plan, ctx.window_shape = mesh, plan, window.shape
        pooled, indices = torch.ops.aten.max_pool2d_with_indices(window, *ctx.call)
        ctx.save_for_backward(indices)
        return pooled  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        shape_only = grad.new_empty(ctx.window_shape)
        grad_window = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, shape_only, *ctx.call, indices
        )
        grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, "max_pool2d")
        return grad_tile, None, None, None, None


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _pool_arguments(rows: Window, cols: Window) -> tuple[Any, ...]:
    """Kernel, stride, padding (already in the window), dilation, ceil mode."""
    return (
        [rows.kernel, cols.kernel],
        [rows.stride, cols.stride],
        [0, 0],
        [rows.dilation, cols.dilation],
        False,
    )


def _empty_output(window: Tensor, moved: WindowMove, mesh: Mesh) -> Tensor:
    samples, height, width = mesh.own_box(moved.output).shape
    return nothing((samples, window.shape[1], height, width), window)


@register_op(F.max_pool2d)
@register_op(torch.max_pool2d)
def max_pool2d(
    input: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        raise refusal(
            F.max_pool2d, [input], "indices of a split image are not supported; pool without them"
        )
    rows, cols = _windows(kernel_size, stride, padding, dilation)
    moved = _move_for("max_pool2d", input, rows, cols, ceil_mode)
    tile = to_tile(input)
    if input.mesh.own_box(moved.output).is_empty:
        window = repartition(tile, input.mesh.grid_comm, moved.plan, name="max_pool2d")
        pooled = _empty_output(window, moved, input.mesh)
    else:
        pooled = _MaxPool.apply(tile, input.mesh, moved.plan, rows, cols)  # type: ignore[no-untyped-call]
    return from_tile(pooled, moved.output, input.mesh)


@register_op(F.avg_pool2d)
def avg_pool2d(
    input: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    rows, cols = _windows(kernel_size, stride, padding, 1)
    moved = _move_for("avg_pool2d", input, rows, cols, ceil_mode)
    window = repartition(to_tile(input), input.mesh.grid_comm, moved.plan, name="avg_pool2d")
    box = input.mesh.own_box(moved.output)
    if box.is_empty:
        return from_tile(_empty_output(window, moved, input.mesh), moved.output, input.mesh)
    summed = F.avg_pool2d(
        window, (rows.kernel, cols.kernel), (rows.stride, cols.stride), divisor_override=1
    )
    if divisor_override is not None:
        return from_tile(summed / divisor_override, moved.output, input.mesh)
    height, width = input.shape[-2:]
    counts = torch.outer(
        _counts(rows, box.row0, box.row1, height, count_include_pad),
        _counts(cols, box.col0, box.col1, width, count_include_pad),
    )
    mean = summed / counts.to(device=summed.device, dtype=summed.dtype)
    return from_tile(mean, moved.output, input.mesh)


def _counts(window: Window, start: int, stop: int, size: int, include_pad: bool) -> Tensor:
    """How many pixels of one dim are averaged for each output in [start, stop)."""
    first = torch.arange(start, stop) * window.stride - window.padding
    last = (first + window.kernel).clamp(max=size + window.padding)
    if not include_pad:
        first, last = first.clamp(min=0), last.clamp(max=size)
    return last - first
