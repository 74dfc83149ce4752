"""Windows that are pooled on split images: the halo is sent while the interior is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import add_up, empty_for, rooms_back, shape_of
from spatialdl.parallel.layout import Box, Window, last_slices
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.bands import BorderBand, Interior, OutputParts, parts_of
from spatialdl.spatial.window import WindowMove

aten = torch.ops.aten

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
class Pooling:
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


class Pool(torch.autograd.Function):
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
        pooling: Pooling,
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
    tile: Tensor, alone: Interior | None, own: Box, pooling: Pooling
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
    window: Tensor, band: BorderBand, y: Tensor, plan: Plan, pooling: Pooling
) -> Tensor:
    """Fill the band's outputs; returns the indices of maxima in its window."""
    pooled, places = pooling.forward(window, pooling.no_padding)
    band.of(y).copy_(pooled)
    if pooling.divisor is None and plan.unowned and y.is_floating_point():
        return _inside_image(pooled, places, band.box, pooling.windows)
    return places


def _gradient_alone(
    grad: Tensor, parts: OutputParts, like: Tensor, places: Tensor, pooling: Pooling
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
