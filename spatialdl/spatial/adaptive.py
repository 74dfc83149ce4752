"""Adaptive average and max pooling.

Output i of o over n pixels reads the *cell* ``[floor(i * n / o), ceil((i + 1) * n / o))``. Cells
are large and cross tiles, so pixels stay where they are: each rank pools what it holds of each
cell, and the few outputs are put together. To 1x1 the result is a plain tensor, the same on every
rank; else it is split evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.comm.repartition import move, move_back, shape_of
from spatialdl.layout import EMPTY_BOX, Box, Layout, even_bounds
from spatialdl.mesh import Mesh
from spatialdl.spatial.dims import are_tokens
from spatialdl.spatial.table import refusal, register_op, spatial_in
from spatialdl.spatial.tensor import SpatialTensor, from_tile, image_of, to_tile
from spatialdl.spatial.window import check_image

aten = torch.ops.aten

Interval = tuple[int, int]


def _touched(size: int, outputs: int, start: int, stop: int) -> Interval:
    """The outputs whose cells hold a pixel of [start, stop)."""
    return start * outputs // size, -(-stop * outputs // size)


def _cells(size: int, outputs: int, start: int, stop: int) -> tuple[Interval, ...]:
    """What [start, stop) holds of the cell of each output that it touches, counted from `start`."""
    first, last = _touched(size, outputs, start, stop)
    return tuple(
        (max(i * size // outputs, start) - start, min(-(-(i + 1) * size // outputs), stop) - start)
        for i in range(first, last)
    )


def _pixels(size: int, outputs: int, start: int, stop: int) -> Tensor:
    """How many pixels the cells of outputs [start, stop) have in one dim."""
    return torch.tensor(
        [-(-(i + 1) * size // outputs) - i * size // outputs for i in range(start, stop)],
        dtype=torch.int64,
    )


@dataclass(frozen=True, eq=False)
class CellMove:
    """One rank's part in an adaptive pooling.

    Attributes:
        output: the layout of the output.
        plan: from the outputs that ranks own to those that their tiles touch. Backwards it adds up
            the parts of each output.
        parts: the same backwards without adding: to each owner the parts of its outputs, those of
            one rank after those of the other in the batch.
        rows, cols: what the tile holds of the cells that it touches.
        tile: the tile, in the image.
    """

    output: Layout
    plan: Plan
    parts: Plan
    rows: tuple[Interval, ...]
    cols: tuple[Interval, ...]
    tile: Box


@lru_cache(maxsize=4096)
def cell_move(layout: Layout, size: tuple[int, int], part: int) -> CellMove:
    """How an image on `layout` is pooled to `size`."""
    samples, height, width = layout.size
    grid = layout.grid
    output = Layout(layout.batch, even_bounds(size[0], grid[0]), even_bounds(size[1], grid[1]))
    touched = tuple(
        EMPTY_BOX
        if box.is_empty
        else Box(
            box.batch0,
            box.batch1,
            *_touched(height, size[0], box.row0, box.row1),
            *_touched(width, size[1], box.col0, box.col1),
        )
        for box in layout.boxes
    )
    in_turn = tuple(
        box._replace(batch0=rank * samples, batch1=(rank + 1) * samples)
        for rank, box in enumerate(touched)
    )
    of_all = tuple(
        EMPTY_BOX if box.is_empty else box._replace(batch1=len(touched) * samples)
        for box in output.boxes
    )
    tile = layout.boxes[part]
    rows = () if tile.is_empty else _cells(height, size[0], tile.row0, tile.row1)
    cols = () if tile.is_empty else _cells(width, size[1], tile.col0, tile.col1)
    plan, parts = plan_for(output.boxes, touched, part), plan_for(in_turn, of_all, part)
    return CellMove(output, plan, parts, rows, cols, tile)


# --- average


def _one_each(cells: tuple[Interval, ...], extent: int) -> bool:
    """Whether each pixel is a cell of its own, as where a size is None."""
    return cells == tuple((pixel, pixel + 1) for pixel in range(extent))


def _sums(x: Tensor, dim: int, cells: tuple[Interval, ...]) -> Tensor:
    if _one_each(cells, x.shape[dim]):
        return x
    parts = [x.narrow(dim, start, stop - start).sum(dim, keepdim=True) for start, stop in cells]
    return torch.cat(parts, dim)


def _spread(x: Tensor, dim: int, cells: tuple[Interval, ...], extent: int) -> Tensor:
    """The adjoint of `_sums`."""
    if _one_each(cells, extent):
        return x
    shape = list(x.shape)
    shape[dim] = extent
    out = x.new_zeros(shape)
    for number, (start, stop) in enumerate(cells):
        out.narrow(dim, start, stop - start).add_(x.narrow(dim, number, 1))
    return out


class _AdaptiveAverage(torch.autograd.Function):
    """Keeps no pixel: the gradient of a mean needs sizes only."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, mesh: Mesh, moved: CellMove, counts: Tensor) -> Tensor:
        ctx.mesh, ctx.moved, ctx.counts, ctx.extent = mesh, moved, counts, tile.shape[-2:]
        wide = tile.float() if tile.dtype in (torch.float16, torch.bfloat16) else tile
        if tile.numel() == 0:
            sums = wide.new_empty(shape_of(wide, moved.plan.need))
        else:
            sums = _sums(_sums(wide, -2, moved.rows), -1, moved.cols)
        total = move_back(mesh.grid_comm, moved.plan, sums, "adaptive_avg_pool2d")
        return (total / counts).to(tile.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        moved, (height, width) = ctx.moved, ctx.extent
        touched = move(
            ctx.mesh.grid_comm, moved.plan, grad / ctx.counts, 0.0, "adaptive_avg_pool2d"
        )
        if height * width == 0:
            return grad.new_empty((*grad.shape[:2], height, width)), None, None, None
        across = _spread(touched, -1, moved.cols, width)
        return _spread(across, -2, moved.rows, height), None, None, None


@register_op(F.adaptive_avg_pool2d, torch._C._nn.adaptive_avg_pool2d, split=("input",))
def adaptive_avg_pool2d(input: SpatialTensor, output_size: Any) -> Tensor:
    size = _output_size(F.adaptive_avg_pool2d, input, output_size)
    height, width = input.shape[-2:]
    mesh, tile = input.mesh, to_tile(input)
    if size == (1, 1) and mesh.grid_comm.size == 1:
        return F.adaptive_avg_pool2d(tile, 1)
    if size == (1, 1):
        wide = torch.float32 if tile.dtype in (torch.float16, torch.bfloat16) else tile.dtype
        part = tile.sum((-2, -1), keepdim=True, dtype=wide)
        total = differentiable_sum(mesh.grid_comm, part, "adaptive_avg_pool2d")
        return (total / (height * width)).to(tile.dtype)
    moved = cell_move(input.spatial_layout, size, mesh.part)
    own = mesh.own_box(moved.output)
    counts = torch.outer(
        _pixels(height, size[0], own.row0, own.row1), _pixels(width, size[1], own.col0, own.col1)
    ).to(input.device)
    mean = _AdaptiveAverage.apply(tile, mesh, moved, counts)  # type: ignore[no-untyped-call]
    return from_tile(mean, moved.output, mesh)


# --- max


def _highest(tile: Tensor, moved: CellMove, width: int) -> tuple[Tensor, Tensor]:
    """What the tile holds of each cell: the highest value, and its place in the image."""
    values, places = [], []
    for top, bottom in moved.rows:
        for left, right in moved.cols:
            value, place = aten.adaptive_max_pool2d(tile[..., top:bottom, left:right], (1, 1))
            row = moved.tile.row0 + top + place // (right - left)
            col = moved.tile.col0 + left + place % (right - left)
            values.append(value)
            places.append(row * width + col)
    shape = (*tile.shape[:2], len(moved.rows), len(moved.cols))
    if not values:
        return tile.new_empty(shape), tile.new_empty(shape, dtype=torch.int64)
    return torch.cat(values, -1).reshape(shape), torch.cat(places, -1).reshape(shape)


def _wins(value: Tensor, place: Tensor, best: Tensor, at: Tensor) -> Tensor:
    """As PyTorch, which goes through a cell row by row: the first highest, or the last NaN."""
    above = (value > best) | ((value == best) & (place < at))
    return torch.where(best.isnan(), value.isnan() & (place > at), above | value.isnan())


def _highest_of_all(
    value: Tensor, place: Tensor, moved: CellMove, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Of the outputs that this rank owns: the highest over all ranks that touch them."""
    name, last = "adaptive_max_pool2d", torch.iinfo(torch.int64).max
    values = move(mesh.grid_comm, moved.parts, value, float("-inf"), name)
    places = move(mesh.grid_comm, moved.parts, place, last, name)
    own = shape_of(value, moved.plan.own)
    if values.numel() == 0:
        return value.new_empty(own), place.new_empty(own)
    best, at = values[: own[0]], places[: own[0]]
    for new, new_at in zip(
        torch.split(values, own[0])[1:], torch.split(places, own[0])[1:], strict=True
    ):
        wins = _wins(new, new_at, best, at)
        best, at = torch.where(wins, new, best), torch.where(wins, new_at, at)
    return best, at


class _AdaptiveMax(torch.autograd.Function):
    """Keeps, of each output that the tile touches, where in the tile its pixel is."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, mesh: Mesh, moved: CellMove, width: int) -> Tensor:
        ctx.mesh, ctx.moved, ctx.shape = mesh, moved, tile.shape
        best, at = _highest_of_all(*_highest(tile, moved, width), moved, mesh)
        if ctx.needs_input_grad[0]:
            at = move(mesh.grid_comm, moved.plan, at, 0, "adaptive_max_pool2d")
            row, col = at // width - moved.tile.row0, at % width - moved.tile.col0
            held = (row >= 0) & (row < tile.shape[2]) & (col >= 0) & (col < tile.shape[3])
            ctx.save_for_backward(torch.where(held, row * tile.shape[3] + col, -1))
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        touched = move(ctx.mesh.grid_comm, ctx.moved.plan, grad, 0.0, "adaptive_max_pool2d")
        grad_tile = grad.new_zeros(ctx.shape)
        if grad_tile.numel() > 0:
            mine = torch.where(places < 0, 0, touched)
            grad_tile.flatten(2).scatter_add_(2, places.clamp(min=0).flatten(2), mine.flatten(2))
        return grad_tile, None, None, None


@register_op(F.adaptive_max_pool2d, split=("input",))
def adaptive_max_pool2d(
    input: SpatialTensor, output_size: Any, return_indices: bool = False
) -> Tensor:
    if return_indices:
        raise _no_indices(F.adaptive_max_pool2d, input)
    size = _output_size(F.adaptive_max_pool2d, input, output_size)
    moved = cell_move(input.spatial_layout, size, input.mesh.part)
    best = _AdaptiveMax.apply(to_tile(input), input.mesh, moved, input.shape[-1])  # type: ignore[no-untyped-call]
    pooled = from_tile(best, moved.output, input.mesh)
    return pooled.full_tensor() if size == (1, 1) else pooled


@register_op(F.adaptive_max_pool2d_with_indices)
def adaptive_max_pool2d_with_indices(*args: Any, **kwargs: Any) -> Tensor:
    raise _no_indices(F.adaptive_max_pool2d_with_indices, *args, **kwargs)


@register_op(torch._C._nn.adaptive_max_pool2d)
def _adaptive_max_pool2d(*args: Any, **kwargs: Any) -> Tensor:
    raise _no_indices(torch._C._nn.adaptive_max_pool2d, *args, **kwargs)


# --- tokens


def _image_of_tokens(func: Any, x: SpatialTensor, output_size: Any) -> SpatialTensor:
    """Tokens (N, C, H*W) that are pooled to one, as the image (N, C, H, W)."""
    size = output_size[0] if isinstance(output_size, tuple | list) else output_size
    if not are_tokens(x.shape, x.spatial_dims) or size != 1:
        raise refusal(
            func, [x], "it pools tokens (N, C, H*W) to size 1 only; pool the image (N, C, H, W)"
        )
    return from_tile(image_of(x), x.spatial_layout, x.mesh)


@register_op(torch.adaptive_avg_pool1d, split=("input",))
def adaptive_avg_pool1d(input: SpatialTensor, output_size: Any) -> Tensor:
    image = _image_of_tokens(F.adaptive_avg_pool1d, input, output_size)
    return F.adaptive_avg_pool2d(image, 1).flatten(2)


@register_op(F.adaptive_max_pool1d, split=("input",))
def adaptive_max_pool1d(
    input: SpatialTensor, output_size: Any, return_indices: bool = False
) -> Tensor:
    if return_indices:
        raise _no_indices(F.adaptive_max_pool1d, input)
    image = _image_of_tokens(F.adaptive_max_pool1d, input, output_size)
    return F.adaptive_max_pool2d(image, 1).flatten(2)


@register_op(torch.adaptive_max_pool1d)
def _adaptive_max_pool1d(*args: Any, **kwargs: Any) -> Tensor:
    raise _no_indices(torch.adaptive_max_pool1d, *args, **kwargs)


@register_op(F.adaptive_max_pool1d_with_indices)
def adaptive_max_pool1d_with_indices(*args: Any, **kwargs: Any) -> Tensor:
    raise _no_indices(F.adaptive_max_pool1d_with_indices, *args, **kwargs)


def _no_indices(func: Any, *args: Any, **kwargs: Any) -> Exception:
    return refusal(
        func,
        spatial_in((args, kwargs)),
        "places within a split image are not supported; call it of torch.nn.functional without "
        "return_indices",
    )


def _output_size(func: Any, x: SpatialTensor, output_size: Any) -> tuple[int, int]:
    check_image(func.__name__, x)
    if not x.is_floating_point():
        raise ValueError(f"{func.__name__} takes floating point numbers, got {x.dtype}")
    asked = tuple(output_size) if isinstance(output_size, tuple | list) else (output_size,) * 2
    if len(asked) != 2:
        raise ValueError(f"{func.__name__}: the output size is (H, W), got {output_size}")
    rows, cols = (
        int(n if wanted is None else wanted) for n, wanted in zip(x.shape[-2:], asked, strict=True)
    )
    if min(rows, cols) < 0:
        raise ValueError(f"{func.__name__}: the output size must not be negative: {output_size}")
    if min(rows, cols) == 0:
        raise refusal(func, [x], "an output without pixels cannot be split")
    return rows, cols
