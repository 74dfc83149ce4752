"""Windows that are pooled on split images, copied together with their halo where tiles lack it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.repartition import empty_for, move_back
from spatialdl.layout.layout import Box, Window
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.window import WindowMove, read_window

aten = torch.ops.aten

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
    """Pooling of a plain tensor without padding.

    Attributes:
        divisor: divides the sum over a window for an average; None for the maximum.
    """

    windows: tuple[Window, ...]
    divisor: int | None = None

    @property
    def name(self) -> str:
        return f"{'max' if self.divisor is None else 'avg'}_pool{len(self.windows)}d"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the indices of maxima (empty for averages)."""
        pool, _ = self._functions
        pooled = pool(with_rows(x), *self._arguments())
        if self.divisor is not None:
            return without_rows(pooled, x), x.new_empty(0, dtype=torch.int64)
        highest, places = pooled
        return without_rows(highest, x), without_rows(places, x)

    def backward(self, grad: Tensor, like: Tensor, places: Tensor) -> Tensor:
        """The gradient of the input, which has the shape of `like`, a tensor on ``meta``."""
        _, pool_backward = self._functions
        layout = like.size(), like.stride()  # values are not read
        x = torch.empty_strided(*layout, dtype=like.dtype, device=grad.device)
        indices = (with_rows(places),) if self.divisor is None else ()
        arguments = (*self._arguments(), *indices)
        return without_rows(pool_backward(with_rows(grad), with_rows(x), *arguments), x)

    @property
    def _functions(self) -> tuple[Any, Any]:
        return (_MAX if self.divisor is None else _AVERAGE)[max(2, len(self.windows))]

    def _arguments(self) -> tuple[Any, ...]:
        rows = len(self.windows) == 1  # see `with_rows`
        windows = (Window(1), *self.windows) if rows else self.windows
        kernel = [window.kernel for window in windows]
        stride = [window.stride for window in windows]
        if self.divisor is not None:
            return kernel, stride, 0, False, True, self.divisor
        return kernel, stride, 0, [window.dilation for window in windows], False


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
        kind, plan = tile.dtype, moved.plan
        if counts is not None:
            tile = wide(tile)
        window = read_window(tile, mesh, plan, pooling.name, fill)
        samples, *size = mesh.own_box(moved.output).shape
        shape = (samples, tile.shape[1], *size)
        if 0 in shape or window.numel() == 0:
            y, places = empty_for(tile, shape), tile.new_empty(0, dtype=torch.int64)
        else:
            y, places = pooling.forward(window)
        if places.numel() and y.is_floating_point():
            _keep_inside(places, plan.need, pooling.windows)
        ctx.mesh, ctx.plan, ctx.pooling, ctx.counts = mesh, plan, pooling, counts
        ctx.like = torch.empty_like(window, device="meta")
        needed = ctx.needs_input_grad[0] and y.is_floating_point()
        ctx.save_for_backward(places if needed else places.new_empty(0))
        if counts is None:
            return y
        rounding = None if kind.is_floating_point else "trunc"
        return torch.div(y, counts, rounding_mode=rounding).to(kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kind, pooling = grad.dtype, ctx.pooling
        if ctx.counts is not None:
            grad = wide(grad) / ctx.counts
        if grad.numel() > 0:
            grad = pooling.backward(grad, ctx.like, *ctx.saved_tensors)
        else:
            grad = torch.zeros_like(ctx.like, device=grad.device)
        if ctx.plan.communicates or ctx.plan.need != ctx.plan.own:
            grad = move_back(ctx.mesh.grid_comm, ctx.plan, grad, pooling.name)
        return grad.to(kind), None, None, None, None, None


def _keep_inside(places: Tensor, need: Box, windows: tuple[Window, ...]) -> None:
    """Move indices of padding before the image to the first pixel of their window, in place.

    PyTorch returns that pixel if all values of a window are -inf.

    Args:
        places: flat indices into the box `need`, which may begin before the image.
    """
    inner = 1
    for dim in reversed(range(len(windows))):
        (start, stop), window = need.spatial[dim], windows[dim]
        if start < 0:
            touched = min(-(start // window.stride), places.shape[2 + dim])
            border = places.narrow(2 + dim, 0, touched)
            step = window.dilation
            missing = (-start - border // inner % (stop - start)).clamp_(min=0)
            border += missing.add_(step - 1).div_(step, rounding_mode="floor") * (step * inner)
        inner *= stop - start
