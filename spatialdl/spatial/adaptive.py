"""Adaptive average and max pooling.

Output i of o over n pixels reads the *cell* ``[floor(i * n / o), ceil((i + 1) * n / o))``. Cells
are large and cross tiles, so no pixels are exchanged: each rank pools its part of each cell, and
the few partial outputs are combined. An output of 1x1 is a plain tensor, the same on every rank;
larger outputs are split evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.reduce import differentiable_sum
from spatialdl.comm.repartition import move, move_back, shape_of
from spatialdl.layout.layout import Box, Layout, empty_box, even_bounds, last_slices
from spatialdl.spatial.autocast import wide, wide_type
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import are_tokens
from spatialdl.spatial.pooled_windows import with_rows, without_rows
from spatialdl.spatial.random.composite import functions_of
from spatialdl.spatial.table import refusal, register_op, register_refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, image_of, to_tile
from spatialdl.spatial.window import check_image
from spatialdl.torch_internals import nn_functions

aten = torch.ops.aten

Interval = tuple[int, int]


def _touched(size: int, outputs: int, start: int, stop: int) -> Interval:
    """The outputs whose cells contain a pixel of [start, stop)."""
    return start * outputs // size, -(-stop * outputs // size)


def _cells(size: int, outputs: int, start: int, stop: int) -> tuple[Interval, ...]:
    """The part of [start, stop) in the cell of each output that it touches, from `start`."""
    first, last = _touched(size, outputs, start, stop)
    return tuple(
        (max(i * size // outputs, start) - start, min(-(-(i + 1) * size // outputs), stop) - start)
        for i in range(first, last)
    )


def _pixels(size: int, outputs: int, start: int, stop: int) -> Tensor:
    """The number of pixels of the cells of outputs [start, stop) in one dim."""
    return torch.tensor(
        [-(-(i + 1) * size // outputs) - i * size // outputs for i in range(start, stop)],
        dtype=torch.int64,
    )


@dataclass(frozen=True, eq=False)
class CellMove:
    """The communication and the cells of one rank in an adaptive pooling.

    Attributes:
        output: the layout of the output.
        plan: from the outputs that ranks own to those that their tiles touch. Its adjoint sums the
            parts of each output.
        parts: sends the parts of each output to its owner without summing, stacked by rank in the
            batch dim.
        cells: for each spatial dim the tile's part of the cells that it touches.
        tile: the tile's box in the image.
        size: of the image.
    """

    output: Layout
    plan: Plan
    parts: Plan
    cells: tuple[tuple[Interval, ...], ...]
    tile: Box
    size: tuple[int, ...]

    @property
    def name(self) -> str:
        """The end of the operation's name, after ``adaptive_avg_``."""
        return f"pool{len(self.size)}d"


@lru_cache(maxsize=4096)
def cell_move(layout: Layout, size: tuple[int, ...], part: int) -> CellMove:
    """The move for pooling an image on `layout` to `size`."""
    samples, empty = layout.samples, empty_box(len(size))
    output = Layout(layout.batch, tuple(map(even_bounds, size, layout.grid)))

    def of_each(box: Box, function: Callable[..., Any]) -> tuple[Any, ...]:
        each = zip(layout.size, size, box.spatial, strict=True)
        return tuple(function(pixels, outputs, *own) for pixels, outputs, own in each)

    touched = tuple(
        empty if box.is_empty else Box((box[0], *of_each(box, _touched))) for box in layout.boxes
    )
    in_turn = tuple(
        box.but(0, (rank * samples, (rank + 1) * samples)) for rank, box in enumerate(touched)
    )
    of_all = tuple(
        empty if box.is_empty else box.but(0, (0, len(touched) * samples)) for box in output.boxes
    )
    tile = layout.boxes[part]
    cells = ((),) * len(size) if tile.is_empty else of_each(tile, _cells)
    plan, parts = plan_for(output.boxes, touched, part), plan_for(in_turn, of_all, part)
    return CellMove(output, plan, parts, cells, tile, layout.size)


# --- average


def _one_each(cells: tuple[Interval, ...], extent: int) -> bool:
    """Whether each cell is one pixel, as where a size is None."""
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
    """Saves no pixels: the gradient of a mean needs sizes only."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, mesh: Mesh, moved: CellMove, counts: Tensor) -> Tensor:
        ctx.mesh, ctx.moved, ctx.counts, ctx.extents = mesh, moved, counts, tile.shape[2:]
        sums = wide(tile)
        if tile.numel() == 0:
            sums = sums.new_empty(shape_of(sums, moved.plan.need))
        else:
            for dim, cells in enumerate(moved.cells, start=2):
                sums = _sums(sums, dim, cells)
        total = move_back(mesh.grid_comm, moved.plan, sums, f"adaptive_avg_{moved.name}")
        return (total / counts).to(tile.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        moved, name = ctx.moved, f"adaptive_avg_{ctx.moved.name}"
        spread = move(ctx.mesh.grid_comm, moved.plan, grad / ctx.counts, 0.0, name)
        if 0 in ctx.extents:
            return grad.new_empty((*grad.shape[:2], *ctx.extents)), None, None, None
        for dim in reversed(range(len(ctx.extents))):
            spread = _spread(spread, 2 + dim, moved.cells[dim], ctx.extents[dim])
        return spread, None, None, None


def _average(function: Any, input: SpatialTensor, output_size: Any, dims: int) -> Tensor:
    size = _output_size(function, input, output_size, dims)
    mesh, tile, pixels = input.mesh, to_tile(input), input.spatial_layout.size
    if prod(size) == 1 and mesh.grid_comm.size == 1:
        mean: Tensor = getattr(F, f"adaptive_avg_pool{dims}d")(tile, 1)  # tokens are an image here
        return mean
    if prod(size) == 1:
        over = tuple(range(2, tile.dim()))
        part = tile.sum(over, keepdim=True, dtype=wide_type(tile.dtype))
        total = differentiable_sum(mesh.grid_comm, part, function.__name__)
        return (total / prod(pixels)).to(tile.dtype)
    moved = cell_move(input.spatial_layout, size, mesh.part)
    counts = on(_pixels_of_cells(pixels, size, mesh.own_box(moved.output)), tile.device)
    mean = _AdaptiveAverage.apply(tile, mesh, moved, counts)  # type: ignore[no-untyped-call]
    return from_tile(mean, moved.output, mesh)


@lru_cache(maxsize=1024)
def _pixels_of_cells(pixels: tuple[int, ...], size: tuple[int, ...], own: Box) -> Tensor:
    """The number of pixels that each output in the box `own` averages."""
    counts = torch.ones((), dtype=torch.int64)
    for extent, outputs, interval in zip(pixels, size, own.spatial, strict=True):
        counts = counts.unsqueeze(-1) * _pixels(extent, outputs, *interval)
    return counts


# --- max

_NO_INDICES = (
    "indices into a split image are not supported; call the function of torch.nn.functional "
    "without return_indices"
)
_HIGHEST = {2: aten.adaptive_max_pool2d, 3: aten.adaptive_max_pool3d}


def _highest(tile: Tensor, moved: CellMove) -> tuple[Tensor, Tensor]:
    """The maximum of the tile's part of each cell, and its index in the image."""
    values, places, dims = [], [], max(2, len(moved.size))
    for cell in product(*moved.cells):
        part = tile[last_slices(slice(*own) for own in cell)]
        value, place = _HIGHEST[dims](with_rows(part), (1,) * dims)
        first = [own + start for (own, _), (start, _) in zip(moved.tile.spatial, cell, strict=True)]
        values.append(without_rows(value, tile))
        places.append(_place(without_rows(place, tile), part.shape[2:], first, moved.size))
    shape = (*tile.shape[:2], *map(len, moved.cells))
    if not values:
        return tile.new_empty(shape), tile.new_empty(shape, dtype=torch.int64)
    return torch.cat(values, -1).reshape(shape), torch.cat(places, -1).reshape(shape)


def _place(
    place: Tensor, inside: Sequence[int], first: Sequence[int], outside: Sequence[int]
) -> Tensor:
    """Convert flat indices into a box of size `inside` to those into a larger box.

    Args:
        first: the start of the box in the larger one, of size `outside`.
    """
    index, stride = torch.zeros_like(place), 1
    for size, start, around in zip(
        reversed(inside), reversed(first), reversed(outside), strict=True
    ):
        index += (place % size + start) * stride
        place, stride = place // size, stride * around
    return index


def _wins(value: Tensor, place: Tensor, best: Tensor, at: Tensor) -> Tensor:
    """Whether a value replaces the best: as in PyTorch, the first maximum or the last NaN."""
    above = (value > best) | ((value == best) & (place < at))
    return torch.where(best.isnan(), value.isnan() & (place > at), above | value.isnan())


def _highest_of_all(
    value: Tensor, place: Tensor, moved: CellMove, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """The maxima of this rank's outputs over all ranks that touch them, and their indices."""
    name, last = f"adaptive_max_{moved.name}", torch.iinfo(torch.int64).max
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
    """Saves the index of the maximum, in the tile, of each output that the tile touches."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, mesh: Mesh, moved: CellMove) -> Tensor:
        ctx.mesh, ctx.moved, ctx.shape = mesh, moved, tile.shape
        best, at = _highest_of_all(*_highest(tile, moved), moved, mesh)
        if ctx.needs_input_grad[0]:
            at = move(mesh.grid_comm, moved.plan, at, 0, f"adaptive_max_{moved.name}")
            ctx.save_for_backward(_held_place(at, moved))
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        name = f"adaptive_max_{ctx.moved.name}"
        touched = move(ctx.mesh.grid_comm, ctx.moved.plan, grad, 0.0, name)
        grad_tile = grad.new_zeros(ctx.shape)
        if grad_tile.numel() > 0:
            own = torch.where(places < 0, 0, touched)
            grad_tile.flatten(2).scatter_add_(2, places.clamp(min=0).flatten(2), own.flatten(2))
        return grad_tile, None, None


def _held_place(at: Tensor, moved: CellMove) -> Tensor:
    """Convert flat indices into the image to those into the tile; -1 for other tiles."""
    index, stride, held = torch.zeros_like(at), 1, torch.ones_like(at, dtype=torch.bool)
    for size, (start, stop) in zip(reversed(moved.size), reversed(moved.tile.spatial), strict=True):
        place = at % size
        held &= (place >= start) & (place < stop)
        index += (place - start) * stride
        at, stride = at // size, stride * (stop - start)
    return torch.where(held, index, -1)


def _max(
    function: Any, input: SpatialTensor, output_size: Any, return_indices: bool, dims: int
) -> Tensor:
    if return_indices:
        raise refusal(function, [input], _NO_INDICES)
    size = _output_size(function, input, output_size, dims)
    moved = cell_move(input.spatial_layout, size, input.mesh.part)
    best = _AdaptiveMax.apply(to_tile(input), input.mesh, moved)  # type: ignore[no-untyped-call]
    pooled = from_tile(best, moved.output, input.mesh)
    return pooled.full_tensor() if prod(size) == 1 else pooled


# --- registration


def _register(average: Any, highest: Any, dims: int) -> None:
    @register_op(*average, split=("input",))
    def adaptive_avg_pool(input: SpatialTensor, output_size: Any) -> Tensor:
        return _average(average[0], input, output_size, dims)

    @register_op(highest, split=("input",))
    def adaptive_max_pool(
        input: SpatialTensor, output_size: Any, return_indices: bool = False
    ) -> Tensor:
        return _max(highest, input, output_size, return_indices, dims)


_register((F.adaptive_avg_pool2d, nn_functions.adaptive_avg_pool2d), F.adaptive_max_pool2d, 2)
_register((F.adaptive_avg_pool3d, nn_functions.adaptive_avg_pool3d), F.adaptive_max_pool3d, 3)


register_refusal(
    _NO_INDICES,
    [
        torch.adaptive_max_pool1d,
        *(getattr(F, f"adaptive_max_pool{dims}d_with_indices") for dims in (1, 2, 3)),
        *functions_of(nn_functions, "adaptive_max_pool2d adaptive_max_pool3d"),
    ],
)


# --- signals (N, C, L), and tokens (N, C, H*W) pooled to one


def _image_of_tokens(func: Any, x: SpatialTensor, output_size: Any) -> SpatialTensor:
    """Tokens (N, C, H*W) to be pooled to one, as the image (N, C, H, W)."""
    size = output_size[0] if isinstance(output_size, tuple | list) else output_size
    if not are_tokens(x.shape, x.spatial_dims) or size != 1:
        raise refusal(
            func, [x], "it pools tokens (N, C, H*W) to size 1 only; pool the image (N, C, H, W)"
        )
    return from_tile(image_of(x), x.spatial_layout, x.mesh)


@register_op(torch.adaptive_avg_pool1d, split=("input",))
def adaptive_avg_pool1d(input: SpatialTensor, output_size: Any) -> Tensor:
    dims = len(input.mesh.grid)
    if dims > 1:
        input = _image_of_tokens(F.adaptive_avg_pool1d, input, output_size)
    return _average(F.adaptive_avg_pool1d, input, output_size, dims).flatten(2)


@register_op(F.adaptive_max_pool1d, split=("input",))
def adaptive_max_pool1d(
    input: SpatialTensor, output_size: Any, return_indices: bool = False
) -> Tensor:
    dims, function = len(input.mesh.grid), F.adaptive_max_pool1d
    if dims > 1 and not return_indices:
        input = _image_of_tokens(function, input, output_size)
    pooled = _max(function, input, output_size, return_indices, dims)
    return pooled.flatten(2)


def _output_size(func: Any, x: SpatialTensor, output_size: Any, dims: int) -> tuple[int, ...]:
    check_image(func.__name__, x, dims)
    if not x.is_floating_point():
        raise ValueError(f"{func.__name__} expects a floating-point input, got {x.dtype}")
    sizes = tuple(output_size) if isinstance(output_size, tuple | list) else (output_size,)
    sizes = sizes * dims if len(sizes) == 1 else sizes
    size = tuple(
        int(n if wanted is None else wanted) for n, wanted in zip(x.shape[2:], sizes, strict=True)
    )
    if min(size) == 0:
        raise refusal(func, [x], "an output without pixels cannot be split")
    return size
