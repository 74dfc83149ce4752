"""Max and average pooling with a window; Lp pooling is put together from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.repartition import empty_for, move, move_back
from spatialdl.layout import Box, Window
from spatialdl.mesh import Mesh
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import (
    WindowMove,
    check_image,
    check_output,
    pair,
    read_window,
    window_move,
)

aten = torch.ops.aten


def _windows(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Window, Window]:
    kernel = pair(kernel_size)
    step = pair(stride) if stride not in (None, [], ()) else kernel
    rows, cols = (
        Window(*values) for values in zip(kernel, step, pair(padding), pair(dilation), strict=True)
    )
    for window in (rows, cols):
        if min(window.kernel, window.stride, window.dilation) < 1 or window.padding < 0:
            raise ValueError(
                f"pooling: kernel, stride and dilation must be at least 1, padding at least 0; got "
                f"{window}"
            )
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


def _outputs(like: Tensor, own: Box) -> Tensor:
    """Memory for this rank's outputs where it has none."""
    samples, height, width = own.shape
    return empty_for(like, (samples, like.shape[1], height, width))


# --- max


class _MaxPool(torch.autograd.Function):
    """Keeps the indices only: the tile with its halo does not outlive the call."""

    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, mesh: Mesh, moved: WindowMove, rows: Window, cols: Window
    ) -> Tensor:
        window = move(mesh.grid_comm, moved.plan, tile, _lowest(tile.dtype), "max_pool2d")
        ctx.call = _pool_arguments(rows, cols)
        ctx.mesh, ctx.plan = mesh, moved.plan
        ctx.like = torch.empty_like(window, device="meta")
        own = mesh.own_box(moved.output)
        if own.is_empty:
            ctx.save_for_backward(tile.new_empty(0, dtype=torch.int64))
            return _outputs(tile, own)
        pooled, indices = aten.max_pool2d_with_indices(window, *ctx.call)
        if not window.dtype.is_floating_point or not ctx.needs_input_grad[0]:
            indices = indices.new_empty(0)
        elif min(moved.plan.need.row0, moved.plan.need.col0) < 0:
            indices = _inside_image(pooled, indices, moved.plan.need, rows, cols)
        ctx.save_for_backward(indices)
        return pooled  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        window = torch.empty_like(ctx.like, device=grad.device)  # only its shape counts
        if grad.numel() == 0:
            grad_window = window.zero_()
        else:
            grad_window = aten.max_pool2d_with_indices_backward(grad, window, *ctx.call, indices)
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


def _inside_image(pooled: Tensor, indices: Tensor, need: Box, rows: Window, cols: Window) -> Tensor:
    """Where all that is read is -inf, PyTorch names the first pixel that is no padding."""
    if pooled.is_meta or not bool(pooled.isneginf().any()):
        return indices
    width = need.shape[2]
    row, col = indices // width, indices % width
    row = _first_inside(row, -need.row0, rows.dilation)
    col = _first_inside(col, -need.col0, cols.dilation)
    return row * width + col


def _first_inside(place: Tensor, padding: int, step: int) -> Tensor:
    """The first of ``place, place + step, ...`` that is not among the `padding` first."""
    return place + (padding - place).clamp(min=0).add(step - 1) // step * step


_NO_INDICES = (
    "places within a split image are not supported; pool without indices, and instead of "
    "unpooling enlarge with interpolate or conv_transpose2d"
)


@register_op(F.max_pool2d, torch.max_pool2d, split=("input",))
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
        raise refusal(F.max_pool2d, [input], _NO_INDICES)
    rows, cols = _windows(kernel_size, stride, padding, dilation)
    moved = _move_for("max_pool2d", input, rows, cols, ceil_mode)
    pooled = _MaxPool.apply(to_tile(input), input.mesh, moved, rows, cols)  # type: ignore[no-untyped-call]
    return from_tile(pooled, moved.output, input.mesh)


def _refuse(advice: str, *functions: Any) -> None:
    for function in functions:

        @register_op(function)
        def refused(*args: Any, function: Any = function, **kwargs: Any) -> Tensor:
            raise refusal(function, spatial_in((args, kwargs)), advice)


_refuse(
    _NO_INDICES,
    F.max_pool2d_with_indices,
    torch._C._nn.max_pool2d_with_indices,
    F.max_unpool2d,
    torch._C._nn.max_unpool2d,
)
_refuse(
    "its windows are drawn at random; use max_pool2d or adaptive_max_pool2d",
    F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices,
    torch._C._nn.fractional_max_pool2d,
)


# --- average


class _AveragePool(torch.autograd.Function):
    """Keeps no pixel: the gradient of a mean needs sizes only.

    `divisor` is what the sum over a window is divided by: one number, or one for each output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        mesh: Mesh,
        moved: WindowMove,
        rows: Window,
        cols: Window,
        divisor: int | Tensor,
    ) -> Tensor:
        window = read_window(tile, mesh, moved.plan, "avg_pool2d")
        ctx.call = ([rows.kernel, cols.kernel], [rows.stride, cols.stride], [0, 0], False, True)
        ctx.mesh, ctx.plan, ctx.divisor = mesh, moved.plan, divisor
        ctx.like = torch.empty_like(window, device="meta")
        own = mesh.own_box(moved.output)
        if own.is_empty:
            return _outputs(tile, own)
        if isinstance(divisor, int):
            return aten.avg_pool2d(window, *ctx.call, divisor)  # type: ignore[no-any-return]
        total = aten.avg_pool2d(_wide(window), *ctx.call, 1)
        rounding = None if tile.is_floating_point() else "trunc"
        return torch.div(total, divisor, rounding_mode=rounding).to(tile.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        window = torch.empty_like(ctx.like, device=grad.device)  # only its shape counts
        divisor = ctx.divisor
        if grad.numel() == 0:
            grad_window = window.zero_()
        else:
            if not isinstance(divisor, int):
                grad, divisor = (_wide(grad) / divisor).to(grad.dtype), 1
            grad_window = aten.avg_pool2d_backward(grad, window, *ctx.call, divisor)
        grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, "avg_pool2d")
        return grad_tile, None, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    """Half types are added up in float32, as PyTorch does."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@register_op(F.avg_pool2d, split=("input",))
def avg_pool2d(
    input: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if divisor_override == 0:
        raise ValueError("avg_pool2d: divisor_override must not be zero")
    rows, cols = _windows(kernel_size, stride, padding, 1)
    moved = _move_for("avg_pool2d", input, rows, cols, ceil_mode)
    mesh = input.mesh
    divisor: int | Tensor
    if divisor_override is not None:
        divisor = divisor_override
    else:
        own, size = mesh.own_box(moved.output), tuple(input.shape[-2:])
        divisor = _divisor(rows, cols, own, size, count_include_pad)
    if isinstance(divisor, Tensor):
        divisor = divisor.to(input.device)
    mean = _AveragePool.apply(to_tile(input), mesh, moved, rows, cols, divisor)  # type: ignore[no-untyped-call]
    return from_tile(mean, moved.output, mesh)


def _divisor(
    rows: Window, cols: Window, own: Box, size: tuple[int, ...], include_pad: bool
) -> int | Tensor:
    """How many pixels are averaged: one number if it is the same for all outputs of this rank."""
    counts = torch.outer(
        _counts(rows, own.row0, own.row1, size[0], include_pad),
        _counts(cols, own.col0, own.col1, size[1], include_pad),
    )
    full = rows.kernel * cols.kernel
    return full if bool((counts == full).all()) else counts


def _counts(window: Window, start: int, stop: int, size: int, include_pad: bool) -> Tensor:
    """How many pixels of one dim are averaged for each output in [start, stop)."""
    first = torch.arange(start, stop) * window.stride - window.padding
    last = (first + window.kernel).clamp(max=size + window.padding)
    if not include_pad:
        first, last = first.clamp(min=0), last.clamp(max=size)
    return last - first
