"""Max and average pooling with a window; Lp pooling is composed of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.comm.repartition import add_up, empty_for, rooms_back, shape_of
from spatialdl.parallel.layout import Box, Layout, Window, last_slices
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.bands import BorderBand, Interior, OutputParts, parts_of
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import are_tokens
from spatialdl.spatial.span import positions
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import (
    WindowMove,
    check_image,
    check_output,
    empty_output,
    per_dim,
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


_NO_PADDING = (0, 0, 0)
_MAX = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}
_AVERAGE = {
    2: (aten.avg_pool2d, aten.avg_pool2d_backward),
    3: (aten.avg_pool3d, aten.avg_pool3d_backward),
}


@dataclass(frozen=True)
class _Pooling:
    """Pooling of a plain tensor.

    Attributes:
        divisor: divides the sum over a window for an average; None for the maximum.
    """

    windows: tuple[Window, ...]
    divisor: int | None = None

    @property
    def name(self) -> str:
        return f"{'max' if self.divisor is None else 'avg'}_pool{len(self.windows)}d"

    def forward(self, x: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The outputs, and the indices of maxima (empty for averages)."""
        pool, _ = self._functions
        if self.divisor is not None:
            averages = pool(with_rows(x), *self._arguments(padding))
            return without_rows(averages, x), x.new_empty(0, dtype=torch.int64)
        highest, places = pool(with_rows(x), *self._arguments(padding))
        return without_rows(highest, x), without_rows(places, x)

    def backward(
        self, grad: Tensor, like: Tensor, padding: Sequence[int], places: Tensor
    ) -> Tensor:
        """The gradient of the input, which has the shape of `like`, a tensor on ``meta``."""
        _, pool_backward = self._functions
        layout = like.size(), like.stride()  # values are not read
        x = torch.empty_strided(*layout, dtype=like.dtype, device=grad.device)
        if self.divisor is not None and any(padding) and not grad.is_cpu:
            # PyTorch's CUDA kernel skips outputs of channels-last averages with padding.
            x, grad = (one.contiguous(memory_format=torch.contiguous_format) for one in (x, grad))
        indices = (with_rows(places),) if self.divisor is None else ()
        arguments = (*self._arguments(padding), *indices)
        return without_rows(pool_backward(with_rows(grad), with_rows(x), *arguments), x)

    @property
    def _functions(self) -> tuple[Any, Any]:
        return (_MAX if self.divisor is None else _AVERAGE)[max(2, len(self.windows))]

    def _arguments(self, padding: Sequence[int]) -> tuple[Any, ...]:
        rows = len(self.windows) == 1  # see `with_rows`
        windows = (Window(1), *self.windows) if rows else self.windows
        kernel = [window.kernel for window in windows]
        stride = [window.stride for window in windows]
        around = [0, *padding] if rows else list(padding)
        if self.divisor is not None:
            return kernel, stride, around, False, True, self.divisor
        return kernel, stride, around, [window.dilation for window in windows], False

    @property
    def no_padding(self) -> tuple[int, ...]:
        return _NO_PADDING[: len(self.windows)]


def with_rows(x: Tensor) -> Tensor:
    """A signal (N, C, L) as an image of one row, as PyTorch has no 1D pooling kernels."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def without_rows(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `with_rows`."""
    return x.squeeze(2) if like.dim() == 3 else x


class _Pool(torch.autograd.Function):
    """Saves the indices of maxima, and no pixel.

    Averages over windows with fewer pixels are sums divided by `counts`, one count per output of
    this rank. This is not a separate operation because some ranks may have no such window, and
    all ranks must save as many tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        mesh: Mesh,
        moved: WindowMove,
        pooling: _Pooling,
        fill: float,
        counts: Tensor | None = None,
    ) -> Tensor:
        kind, ctx.counts = tile.dtype, counts
        if counts is not None:
            tile = wide(tile)
        plan, own = moved.plan, mesh.own_box(moved.output)
        parts = parts_of(plan.own, own, moved.size, pooling.windows)
        arrivals = [
            BoxedTensor(empty_for(tile, shape_of(tile, box)), box) for _, box in plan.receives
        ]
        exchange = None
        if plan.communicates:
            halo = Exchange(plan, [BoxedTensor(tile, plan.own)], arrivals, tile.device)
            exchange = start_exchange(mesh.grid_comm, halo, pooling.name)
        y, indices = _pooled_alone(tile, parts.alone, own, pooling)
        if exchange is not None:
            exchange.wait()
        places, likes = [indices], [torch.empty_like(tile, device="meta")]
        for band in parts.bands:
            if band is not None:
                window = band.window(tile, plan, arrivals, fill)
                indices = _pooled_band(window, band, y, plan, pooling)
                likes.append(torch.empty_like(window, device="meta"))
            places.append(indices if band is not None else indices.new_empty(0))
        ctx.mesh, ctx.plan, ctx.parts, ctx.pooling, ctx.likes = mesh, plan, parts, pooling, likes
        needed = ctx.needs_input_grad[0] and y.is_floating_point()
        ctx.save_for_backward(*(indices if needed else indices.new_empty(0) for indices in places))
        if counts is None:
            return y
        rounding = None if kind.is_floating_point else "trunc"
        return torch.div(y, counts, rounding_mode=rounding).to(kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, parts, pooling, kind = ctx.plan, ctx.parts, ctx.pooling, grad.dtype
        if ctx.counts is not None:
            grad = wide(grad) / ctx.counts
        places, (like, *likes) = ctx.saved_tensors, ctx.likes
        saved = [(b, p) for b, p in zip(parts.bands, places[1:], strict=True) if b is not None]
        bands = [
            (band, pooling.backward(band.of(grad), window, pooling.no_padding, place))
            for (band, place), window in zip(saved, likes, strict=True)
        ]
        arrivals, exchange = rooms_back(grad, plan), None
        if plan.communicates:
            halos = [
                BoxedTensor(grad.new_zeros(shape_of(grad, box)), box) for _, box in plan.receives
            ]
            _add_bands(bands, halos)
            back = Exchange(plan, halos, arrivals, grad.device, adjoint=True)
            exchange = start_exchange(ctx.mesh.grid_comm, back, pooling.name)
        grad_tile = _gradient_alone(grad, parts, like, places[0], pooling)
        _add_bands(bands, [BoxedTensor(grad_tile, plan.own)])
        if exchange is not None:
            exchange.wait()
            add_up(grad_tile, plan, arrivals)
        return grad_tile.to(kind), None, None, None, None, None


def _pooled_alone(
    tile: Tensor, alone: Interior | None, own: Box, pooling: _Pooling
) -> tuple[Tensor, Tensor]:
    """A buffer of all outputs, filled where the tile suffices; indices into the tile."""
    samples, *size = own.shape
    shape = (samples, tile.shape[1], *size)
    if alone is None:
        return empty_for(tile, shape), tile.new_empty(0, dtype=torch.int64)
    pooled, places = pooling.forward(tile, alone.padding)
    if pooled.shape == shape and alone.outputs == alone.computed:
        return pooled, places
    y = empty_for(tile, shape)
    y[last_slices(alone.outputs)] = pooled[last_slices(alone.computed)]
    return y, places


def _pooled_band(
    window: Tensor, band: BorderBand, y: Tensor, plan: Plan, pooling: _Pooling
) -> Tensor:
    """Fill the band's outputs; returns the indices of maxima in its window."""
    pooled, places = pooling.forward(window, pooling.no_padding)
    band.of(y).copy_(pooled)
    if pooling.divisor is None and plan.unowned and y.is_floating_point():
        return _inside_image(pooled, places, band.box, pooling.windows)
    return places


def _gradient_alone(
    grad: Tensor, parts: OutputParts, like: Tensor, places: Tensor, pooling: _Pooling
) -> Tensor:
    """The gradient of the tile from the outputs that need only the tile."""
    alone = parts.alone
    if alone is None:
        return torch.zeros_like(like, device=grad.device)
    if any(parts.bands) or alone.size != grad.shape[2:]:
        padded = empty_for(grad, (*grad.shape[:2], *alone.size)).zero_()
        padded[last_slices(alone.computed)] = grad[last_slices(alone.outputs)]
        grad = padded
    return pooling.backward(grad, like, alone.padding, places)


def _add_bands(bands: Sequence[tuple[BorderBand, Tensor]], targets: Sequence[BoxedTensor]) -> None:
    for band, grad in bands:
        for target in targets:
            band.add_to(target, grad)


# --- max


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _inside_image(pooled: Tensor, places: Tensor, need: Box, windows: tuple[Window, ...]) -> Tensor:
    """`places` with indices of padding replaced by the first pixel that is not padding.

    PyTorch returns that pixel if all values of a window are -inf.
    """
    spread, rest = [], places
    for extent in reversed(need.shape[1:]):
        spread.append(rest % extent)
        rest = rest // extent
    inside = torch.zeros_like(places)
    for place, (start, stop), window in zip(reversed(spread), need.spatial, windows, strict=True):
        inside = inside * (stop - start) + _first_inside(place, -start, window.dilation)
    return inside


def _first_inside(place: Tensor, padding: int, step: int) -> Tensor:
    """The first of ``place, place + step, ...`` that is at least `padding`."""
    return place + (padding - place).clamp(min=0).add(step - 1) // step * step


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
        windows = _windows(dims, kernel_size, stride, padding, dilation)
        if _windows_are_whole(input, dims):
            arguments = kernel_size, stride, padding, dilation, ceil_mode
            return _by_tile(input, dims, lambda x: functions[0](x, *arguments))
        moved = _move_for(f"max_pool{dims}d", input, windows, ceil_mode)
        tile = to_tile(input)
        pooled = _Pool.apply(tile, input.mesh, moved, _Pooling(windows), _lowest(tile.dtype))  # type: ignore[no-untyped-call]
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
    "its windows are random; use max pooling or adaptive max pooling",
    F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices,
    torch._C._nn.fractional_max_pool2d,
    F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices,
    torch._C._nn.fractional_max_pool3d,
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
        if divisor_override == 0:
            raise ValueError(f"{name}: divisor_override must not be zero")
        windows = _windows(dims, kernel_size, stride, padding, 1)
        if dims == 1 and len(input.mesh.grid) > 1 and are_tokens(input.shape, input.spatial_dims):
            return _mean_of_tokens(input, windows[0], ceil_mode, divisor_override)
        if _windows_are_whole(input, dims):
            arguments = kernel_size, stride, padding, ceil_mode, count_include_pad
            divisors = () if dims == 1 else (divisor_override,)
            return _by_tile(input, dims, lambda x: functions[0](x, *arguments, *divisors))
        moved = _move_for(name, input, windows, ceil_mode)
        mesh = input.mesh
        tile = to_tile(input)
        divisor = divisor_override or _divisor(
            windows, moved.output, mesh.part, moved.size, count_include_pad
        )
        pooling = _Pooling(windows, divisor if isinstance(divisor, int) else 1)
        counts = None if isinstance(divisor, int) else on(divisor, tile.device)
        mean = _Pool.apply(tile, mesh, moved, pooling, 0.0, counts)  # type: ignore[no-untyped-call]
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
    check_output("avg_pool1d", input, (count,))
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
