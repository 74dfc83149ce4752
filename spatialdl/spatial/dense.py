"""Linear layers over a flattened map, whose last dim holds channels and all spatial dims.

Each rank has some columns of the flattened map. They are not contiguous: a tile of (N, C*H*W) has
a box of pixels of each channel. The rank multiplies them by the same columns of the weight, and the
products are summed over the ranks. No rank ever has the whole map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.parallel.layout import Interval
from spatialdl.spatial.autocast import HALF
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.span import on_meta
from spatialdl.spatial.tensor import SpatialTensor, to_tile


class Columns(NamedTuple):
    """The columns of a weight that belong to a rank.

    Attributes:
        dims: of the flattened map: all spatial dims are in its last dim.
        size: of the map.
        box: the rank's intervals of the spatial dims.
        is_first: whether the rank also has the columns that belong to no pixel.
    """

    dims: SpatialDims
    size: tuple[int, ...]
    box: tuple[Interval, ...]
    is_first: bool

    @classmethod
    def of(cls, x: SpatialTensor) -> Columns:
        layout, mesh = x.spatial_layout, x.mesh
        box = mesh.own_box(layout).spatial
        return cls(x.spatial_dims, layout.size, tuple(box), mesh.part == 0)

    def views(self, weight: Tensor) -> list[Tensor]:
        """Views of the columns of a weight, (out, ...) each, in the order of the tile.

        Args:
            weight: (out, in), all columns.
        """
        before, stop = self.dims.prefix, weight.shape[1] - self.dims.suffix
        factors: list[int] = []
        for outer, size in zip(self.dims.outer, self.size, strict=True):
            factors += [outer, size]
        pixels = weight[:, before:stop].view(len(weight), *factors)
        for number, (first, last) in enumerate(self.box):
            pixels = pixels.narrow(2 * number + 2, first, last - first)
        beside = self.dims.beside and self.is_first
        return [weight[:, :before], pixels, weight[:, stop:]] if beside else [pixels]

    def taken(self, weight: Tensor) -> Tensor:
        """The columns of a weight (out, in): (out, own)."""
        parts = [one.flatten(1) for one in self.views(weight)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def placed(self, own: Tensor, count: int) -> Tensor:
        """The columns (out, own) placed in zeros (out, `count`)."""
        whole = own.new_zeros(len(own), count)
        views = self.views(whole)
        parts = torch.split(own, [one[0].numel() for one in views], 1)
        for one, part in zip(views, parts, strict=True):
            one.copy_(part.view(one.shape))
        return whole


class _OwnColumns(torch.autograd.Function):
    """A rank's part of the product; saves the tile and the weight, as PyTorch does."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, weight: Tensor, columns: Columns, mixed: bool) -> Tensor:
        ctx.save_for_backward(tile, weight)
        ctx.columns, ctx.mixed = columns, mixed
        return F.linear(tile, _cast(columns.taken(weight), tile, mixed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight = ctx.saved_tensors
        needs_tile, needs_weight = ctx.needs_input_grad[:2]
        columns: Columns = ctx.columns
        count = math.prod(grad.shape[:-1])  # -1 is ambiguous for an empty tile
        grad_tile = grad_weight = None
        if needs_weight:
            rows = grad.reshape(count, grad.shape[-1])
            own = rows.t() @ tile.reshape(count, tile.shape[-1]).conj()
            grad_weight = columns.placed(own.to(weight.dtype), weight.shape[1])
        if needs_tile:
            grad_tile = grad @ _cast(columns.taken(weight), tile, ctx.mixed).conj()
        return grad_tile, grad_weight, None, None


def _cast(own: Tensor, tile: Tensor, mixed: bool) -> Tensor:
    """Cast as autocast does; without autocast a dtype mismatch raises PyTorch's error."""
    return own.to(tile.dtype) if mixed else own


def dense(input: SpatialTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` over a flattened map: a plain tensor, the same on every rank.

    Args:
        input: (..., in), with all spatial dims in its last dim.
        weight: (out, in), or (in,).
        bias: (out,) or ().
    """
    if input.mesh.grid_comm.size == 1:
        return F.linear(to_tile(input), weight, bias)
    kind = input.device.type
    mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    _check(mixed, [input, weight] if bias is None else [input, weight, bias])
    if weight.dim() == 1:
        return dense(input, weight[None], None).squeeze(-1)
    tile = to_tile(input)
    if mixed and tile.dtype in (torch.float32, *HALF):
        tile = tile.to(torch.get_autocast_dtype(kind))
    part: Tensor = _OwnColumns.apply(tile, weight, Columns.of(input), mixed)  # type: ignore[no-untyped-call]
    wide = part.float() if part.dtype in HALF else part
    total = differentiable_sum(input.mesh.grid_comm, wide, "linear")
    if bias is not None:
        total = total + bias.to(total.dtype)  # rounded once, as by a kernel
    return total.to(part.dtype)


def _check(mixed: bool, operands: Sequence[Tensor]) -> None:
    """Raise PyTorch's errors on all ranks."""
    if mixed:  # autocast accepts different dtypes
        operands = [torch.empty(one.shape, device="meta") for one in operands]
    on_meta(F.linear, *operands)
