"""Max and average pooling with a window; Lp pooling is composed of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.reduce import differentiable_sum
from spatialdl.layout.layout import Layout, Window
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import are_tokens
from spatialdl.spatial.pooled_windows import Pool, Pooling
from spatialdl.spatial.random.composite import functions_of
from spatialdl.spatial.span import positions
from spatialdl.spatial.table import refusal, register_op, register_refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import empty_output, plan_windows, windows_of
from spatialdl.torch_internals import nn_functions


def _pooling_windows(
    name: str, dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any = 1
) -> tuple[Window, ...]:
    stride = kernel_size if stride in (None, [], ()) else stride
    return windows_of(name, dims, kernel_size, stride, padding, dilation)


def _windows_are_whole(x: SpatialTensor, dims: int) -> bool:
    """Whether the pooled dims are not split, e.g. where whole windows are samples."""
    return all(dim < -dims for dim in x.spatial_dims.at)


def _by_tile(x: SpatialTensor, dims: int, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """Pool dims that are not split, without communication."""
    whole = pool(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # raises on all ranks
    tile = to_tile(x)
    if tile.numel() == 0:
        pooled = empty_output((*tile.shape[:-dims], *whole.shape[-dims:]), tile)
    else:
        pooled = pool(tile)
    return from_tile(pooled, x.spatial_layout, x.mesh, x.spatial_dims)


# --- max


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


_NO_INDICES = (
    "indices into a split image are not supported; pool without return_indices, and replace "
    "unpooling by interpolate or a transposed convolution"
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
        name = f"max_pool{dims}d"
        windows = _pooling_windows(name, dims, kernel_size, stride, padding, dilation)
        if _windows_are_whole(input, dims):
            arguments = kernel_size, stride, padding, dilation, ceil_mode
            return _by_tile(input, dims, lambda x: functions[0](x, *arguments))
        moved = plan_windows(name, input, windows, ceil_mode)
        tile = to_tile(input)
        pooled = Pool.apply(tile, input.mesh, moved, Pooling(windows), _lowest(tile.dtype))  # type: ignore[no-untyped-call]
        return from_tile(pooled, moved.output, input.mesh)


_register_max(1, F.max_pool1d, torch.max_pool1d)
_register_max(2, F.max_pool2d, torch.max_pool2d)
_register_max(3, F.max_pool3d, torch.max_pool3d)


_POOLS = "max_pool{0}d_with_indices max_unpool{0}d"
register_refusal(_NO_INDICES, [torch.max_pool1d_with_indices])
for _dims in (1, 2, 3):
    register_refusal(_NO_INDICES, functions_of(F, _POOLS.format(_dims)))
for _dims in (2, 3):
    _fractional = f"fractional_max_pool{_dims}d"
    register_refusal(_NO_INDICES, functions_of(nn_functions, _POOLS.format(_dims)))
    register_refusal(
        "its windows are random; use max pooling or adaptive max pooling",
        [
            *functions_of(F, f"{_fractional} {_fractional}_with_indices"),
            getattr(nn_functions, _fractional),
        ],
    )


# --- average


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
        windows = _pooling_windows(name, dims, kernel_size, stride, padding)
        if dims == 1 and len(input.mesh.grid) > 1 and are_tokens(input.shape, input.spatial_dims):
            return _mean_of_tokens(input, windows[0], ceil_mode, divisor_override)
        if _windows_are_whole(input, dims):
            arguments = kernel_size, stride, padding, ceil_mode, count_include_pad
            divisors = () if dims == 1 else (divisor_override,)
            return _by_tile(input, dims, lambda x: functions[0](x, *arguments, *divisors))
        moved = plan_windows(name, input, windows, ceil_mode)
        mesh = input.mesh
        tile = to_tile(input)
        divisor = divisor_override or _divisor(
            windows, moved.output, mesh.part, input.spatial_layout.size, count_include_pad
        )
        pooling = Pooling(windows, divisor if isinstance(divisor, int) else 1)
        counts = None if isinstance(divisor, int) else on(divisor, tile.device)
        mean = Pool.apply(tile, mesh, moved, pooling, 0.0, counts)  # type: ignore[no-untyped-call]
        return from_tile(mean, moved.output, mesh)


def _mean_of_tokens(
    input: SpatialTensor, window: Window, ceil_mode: bool, divisor: int | None
) -> Tensor:
    """Means of consecutive tokens (N, C, H*W), a plain tensor.

    The tokens of a window may span several rows and so several ranks.
    """
    if window.stride != window.kernel or window.padding or ceil_mode:
        raise refusal(
            F.avg_pool1d, [input], "windows over tokens of an image must not overlap or be padded"
        )
    count = window.output_size(input.shape[-1])
    if count < 1:
        raise ValueError(f"avg_pool1d: {input.shape[-1]} tokens are fewer than {window.kernel}")
    tile = wide(to_tile(input))
    place = on(positions(input, -1) // window.kernel, tile.device).clamp(max=count)
    sums = tile.new_zeros(*tile.shape[:-1], count + 1).index_add(-1, place, tile)
    total = differentiable_sum(input.mesh.grid_comm, sums[..., :count], "avg_pool1d")
    return (total / (divisor or window.kernel)).to(input.dtype)


_register_average(1, F.avg_pool1d)
_register_average(2, F.avg_pool2d)
_register_average(3, F.avg_pool3d)


@lru_cache(maxsize=1024)
def _divisor(
    windows: tuple[Window, ...], output: Layout, part: int, size: tuple[int, ...], include_pad: bool
) -> int | Tensor:
    """The number of averaged pixels: an int if it is equal for all outputs of all ranks.

    Otherwise all ranks sum in float32, because halos are sent in the dtype of the sum.
    """
    by_dim = [
        _counts(window, outputs, extent, include_pad)
        for window, outputs, extent in zip(windows, output.size, size, strict=True)
    ]
    if all(bool((counts == w.kernel).all()) for counts, w in zip(by_dim, windows, strict=True)):
        return prod(window.kernel for window in windows)
    counts = torch.ones((), dtype=torch.int64)
    for one, (start, stop) in zip(by_dim, output.boxes[part].spatial, strict=True):
        counts = counts.unsqueeze(-1) * one[start:stop]
    return counts


def _counts(window: Window, outputs: int, size: int, include_pad: bool) -> Tensor:
    """The number of averaged pixels for each output of one dim."""
    first = torch.arange(outputs) * window.stride - window.padding
    last = (first + window.kernel).clamp(max=size + window.padding)
    if not include_pad:
        first, last = first.clamp(min=0), last.clamp(max=size)
    return last - first
