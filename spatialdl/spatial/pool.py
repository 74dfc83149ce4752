"""Max and average pooling with a window; Lp pooling is put together from them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.repartition import empty_for, move, move_back
from spatialdl.parallel.layout import Box, Window
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import (
    WindowMove,
    check_image,
    check_output,
    per_dim,
    read_window,
    window_move,
)

aten = torch.ops.aten


def _windows(
    dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Window, ...]:
    kernel = per_dim(kernel_size, dims)
    step = per_dim(stride, dims) if stride not in (None, [], ()) else kernel
    windows = tuple(map(Window, kernel, step, per_dim(padding, dims), per_dim(dilation, dims)))
    for window in windows:
        if min(window.kernel, window.stride, window.dilation) < 1 or window.padding < 0:
            raise ValueError(
                f"pooling: kernel, stride and dilation must be at least 1, padding at least 0; got "
                f"{window}"
            )
        if window.padding > window.kernel // 2:
            raise ValueError(
                f"pooling: padding {window.padding} is more than half of the kernel {window.kernel}"
            )
    return windows


def _move_for(
    name: str, x: SpatialTensor, windows: tuple[Window, ...], ceil_mode: bool
) -> WindowMove:
    check_image(name, x, len(windows))
    size = tuple(
        window.output_size(pixels, ceil_mode)
        for window, pixels in zip(windows, x.shape[2:], strict=True)
    )
    check_output(name, x, size)
    return window_move(x.spatial_layout, windows, size, x.mesh.part)


def _outputs(like: Tensor, own: Box) -> Tensor:
    """Memory for this rank's outputs where it has none."""
    samples, *spatial = own.shape
    return empty_for(like, (samples, like.shape[1], *spatial))


# --- max


_MAX = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}


class _MaxPool(torch.autograd.Function):
    """Keeps the indices only: the tile with its halo does not outlive the call."""

    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, mesh: Mesh, moved: WindowMove, windows: tuple[Window, ...]
    ) -> Tensor:
        name = f"max_pool{len(windows)}d"
        window = move(mesh.grid_comm, moved.plan, tile, _lowest(tile.dtype), name)
        ctx.call, ctx.name = _pool_arguments(windows), name
        ctx.mesh, ctx.plan = mesh, moved.plan
        ctx.like = torch.empty_like(window, device="meta")
        own = mesh.own_box(moved.output)
        if own.is_empty:
            ctx.save_for_backward(tile.new_empty(0, dtype=torch.int64))
            return _outputs(tile, own)
        pooled, indices = _max_pooled(window, ctx.call)
        if not window.dtype.is_floating_point or not ctx.needs_input_grad[0]:
            indices = indices.new_empty(0)
        elif min(start for start, _ in moved.plan.need.spatial) < 0:
            indices = _inside_image(pooled, indices, moved.plan.need, windows)
        ctx.save_for_backward(indices)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        window = torch.empty_like(ctx.like, device=grad.device)  # only its shape counts
        if grad.numel() == 0:
            grad_window = window.zero_()
        else:
            backward = _MAX[max(2, window.dim() - 2)][1]
            arguments = with_rows(grad), with_rows(window), *ctx.call, with_rows(indices)
            grad_window = without_rows(backward(*arguments), window)
        grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, ctx.name)
        return grad_tile, None, None, None


def with_rows(x: Tensor) -> Tensor:
    """A signal (N, C, L) as an image of one row: PyTorch has no kernels of one dim for pooling."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def without_rows(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `with_rows`."""
    return x.squeeze(2) if like.dim() == 3 else x


def _max_pooled(window: Tensor, call: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    pooled, indices = _MAX[max(2, window.dim() - 2)][0](with_rows(window), *call)
    return without_rows(pooled, window), without_rows(indices, window)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _pool_arguments(windows: tuple[Window, ...]) -> tuple[Any, ...]:
    """Kernel, stride, padding (already in the window), dilation, ceil mode."""
    if len(windows) == 1:
        windows = (Window(1), *windows)
    return (
        [window.kernel for window in windows],
        [window.stride for window in windows],
        [0] * len(windows),
        [window.dilation for window in windows],
        False,
    )


def _inside_image(
    pooled: Tensor, indices: Tensor, need: Box, windows: tuple[Window, ...]
) -> Tensor:
    """Where all that is read is -inf, PyTorch names the first pixel that is no padding."""
    if pooled.is_meta or not bool(pooled.isneginf().any()):
        return indices
    places, rest = [], indices
    for extent in reversed(need.shape[1:]):
        places.append(rest % extent)
        rest = rest // extent
    found = torch.zeros_like(indices)
    for place, (start, stop), window in zip(reversed(places), need.spatial, windows, strict=True):
        found = found * (stop - start) + _first_inside(place, -start, window.dilation)
    return found


def _first_inside(place: Tensor, padding: int, step: int) -> Tensor:
    """The first of ``place, place + step, ...`` that is not among the `padding` first."""
    return place + (padding - place).clamp(min=0).add(step - 1) // step * step


_NO_INDICES = (
    "places within a split image are not supported; pool without indices, and instead of "
    "unpooling enlarge with interpolate or a transposed convolution"
)


def _register_max(dims: int, *functions: Any) -> None:
    @register_op(*functions, split=("input",))
    def max_pool(
        input: SpatialTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        if return_indices:
            raise refusal(functions[0], [input], _NO_INDICES)
        windows = _windows(dims, kernel_size, stride, padding, dilation)
        moved = _move_for(f"max_pool{dims}d", input, windows, ceil_mode)
        pooled = _MaxPool.apply(to_tile(input), input.mesh, moved, windows)  # type: ignore[no-untyped-call]
        return from_tile(pooled, moved.output, input.mesh)


_register_max(1, F.max_pool1d, torch.max_pool1d)
_register_max(2, F.max_pool2d, torch.max_pool2d)
_register_max(3, F.max_pool3d, torch.max_pool3d)


def _refuse(advice: str, *functions: Any) -> None:
    for function in functions:

        @register_op(function)
        def refused(*args: Any, function: Any = function, **kwargs: Any) -> Tensor:
            raise refusal(function, spatial_in((args, kwargs)), advice)


_refuse(
    _NO_INDICES,
    F.max_pool1d_with_indices,
    torch.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    torch._C._nn.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    torch._C._nn.max_pool3d_with_indices,
    F.max_unpool1d,
    F.max_unpool2d,
    torch._C._nn.max_unpool2d,
    F.max_unpool3d,
    torch._C._nn.max_unpool3d,
)
_refuse(
    "its windows are drawn at random; use max pooling or adaptive max pooling",
    F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices,
    torch._C._nn.fractional_max_pool2d,
    F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices,
    torch._C._nn.fractional_max_pool3d,
)


# --- average


_AVERAGE = {
    2: (aten.avg_pool2d, aten.avg_pool2d_backward),
    3: (aten.avg_pool3d, aten.avg_pool3d_backward),
}


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
        windows: tuple[Window, ...],
        divisor: int | Tensor,
    ) -> Tensor:
        name = f"avg_pool{len(windows)}d"
        window = read_window(tile, mesh, moved.plan, name)
        kernel, stride, none, *_ = _pool_arguments(windows)
        ctx.call, ctx.name = (kernel, stride, none, False, True), name
        ctx.mesh, ctx.plan, ctx.divisor = mesh, moved.plan, divisor
        ctx.like = torch.empty_like(window, device="meta")
        own = mesh.own_box(moved.output)
        if own.is_empty:
            return _outputs(tile, own)
        if isinstance(divisor, int):
            return _averaged(window, *ctx.call, divisor)
        total = _averaged(_wide(window), *ctx.call, 1)
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
            backward = _AVERAGE[max(2, window.dim() - 2)][1]
            grad_window = backward(with_rows(grad), with_rows(window), *ctx.call, divisor)
            grad_window = without_rows(grad_window, window)
        grad_tile = move_back(ctx.mesh.grid_comm, ctx.plan, grad_window, ctx.name)
        return grad_tile, None, None, None, None


def _averaged(window: Tensor, *call: Any) -> Tensor:
    pooled: Tensor = _AVERAGE[max(2, window.dim() - 2)][0](with_rows(window), *call)
    return without_rows(pooled, window)


def _wide(x: Tensor) -> Tensor:
    """Half types are added up in float32, as PyTorch does."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _register_average(dims: int, *functions: Any) -> None:
    @register_op(*functions, split=("input",))
    def avg_pool(
        input: SpatialTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        name = f"avg_pool{dims}d"
        if divisor_override == 0:
            raise ValueError(f"{name}: divisor_override must not be zero")
        windows = _windows(dims, kernel_size, stride, padding, 1)
        moved = _move_for(name, input, windows, ceil_mode)
        mesh = input.mesh
        divisor: int | Tensor
        if divisor_override is not None:
            divisor = divisor_override
        else:
            own, size = mesh.own_box(moved.output), input.spatial_layout.size
            divisor = _divisor(windows, own, size, count_include_pad)
        if isinstance(divisor, Tensor):
            divisor = divisor.to(input.device)
        mean = _AveragePool.apply(to_tile(input), mesh, moved, windows, divisor)  # type: ignore[no-untyped-call]
        return from_tile(mean, moved.output, mesh)


_register_average(1, F.avg_pool1d)
_register_average(2, F.avg_pool2d)
_register_average(3, F.avg_pool3d)


def _divisor(
    windows: tuple[Window, ...], own: Box, size: tuple[int, ...], include_pad: bool
) -> int | Tensor:
    """How many pixels are averaged: one number if it is the same for all outputs of this rank."""
    counts = torch.ones((), dtype=torch.int64)
    for window, (start, stop), extent in zip(windows, own.spatial, size, strict=True):
        counts = counts.unsqueeze(-1) * _counts(window, start, stop, extent, include_pad)
    full = prod(window.kernel for window in windows)
    return full if bool((counts == full).all()) else counts


def _counts(window: Window, start: int, stop: int, size: int, include_pad: bool) -> Tensor:
    """How many pixels of one dim are averaged for each output in [start, stop)."""
    first = torch.arange(start, stop) * window.stride - window.padding
    last = (first + window.kernel).clamp(max=size + window.padding)
    if not include_pad:
        first, last = first.clamp(min=0), last.clamp(max=size)
    return last - first
