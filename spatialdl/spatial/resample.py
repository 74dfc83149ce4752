"""Interpolation of split images: nearest, bilinear, bicubic, by size and by scale.

By a whole factor PyTorch's own kernel runs on the tile and the halo that it needs. In all other
cases each rank fetches the inputs that its outputs read, and adds them up by a table of global
indices and weights (see `taps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.layout import Bounds, Box, Layout, even_bounds, scaled_bounds, strided_bounds
from spatialdl.spatial.reindex import fetch, one_sample
from spatialdl.spatial.span import without_data
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.taps import Resampling, Taps, taps_of
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import check_image, nothing

Call = Callable[..., Any]
HALO = {"nearest": 0, "nearest-exact": 0, "linear": 1, "cubic": 2}
"""Inputs beyond the own ones that outputs read where an image grows by a whole factor."""


def _resampling(
    function: Call,
    mode: str,
    input: SpatialTensor,
    arguments: Sequence[Any],
    align_corners: bool,
    antialias: bool,
) -> Tensor:
    """`arguments`: (size, scale factors) or (size, scale of rows, scale of columns)."""
    check_image(function.__name__, input)
    corners = () if mode.startswith("nearest") else (align_corners,)
    size, *scales = arguments
    whole = function(without_data(input), size, *corners, *scales)
    factors = scales[0] if len(scales) == 1 else scales
    row_scale, col_scale = factors or (None, None)
    height, width = input.shape[-2:]
    rows, cols = (
        Resampling(mode, n, m, align_corners, antialias, scale)
        for n, m, scale in zip(
            (height, width), whole.shape[-2:], (row_scale, col_scale), strict=True
        )
    )
    if rows.mode in ("linear", "cubic") and not input.is_floating_point():
        raise refusal(function, [input], "convert it to a floating-point type first")
    if antialias and cols.count == 1:
        raise refusal(
            function, [input], "PyTorch itself errs in images that become one column; two are exact"
        )
    if input.requires_grad:
        _check_gradient(function, input, rows, cols)
    fast = _by_kernel(input, rows, cols) if rows.factor and cols.factor else None
    return fast if fast is not None else _by_table(input, rows, cols)


def _check_gradient(
    function: Call, input: SpatialTensor, rows: Resampling, cols: Resampling
) -> None:
    """Refuse a scale factor that keeps the size: PyTorch 2.13 copies in one direction only.

    With antialiasing in each dim by itself, else in bicubic images of which both sizes are kept.
    """
    kept = [how for how in (rows, cols) if how.size == how.count]
    scaled = [how.scale for how in kept if not how.align_corners and how.scale not in (None, 1.0)]
    if scaled and (rows.antialias or (rows.mode == "cubic" and len(kept) == 2)):
        raise refusal(
            function,
            [input],
            f"PyTorch's own gradient is wrong where a scale factor of {scaled[0]} keeps the size; "
            "give size=, or recompute_scale_factor=True",
        )


def _bounds(bounds: Bounds, how: Resampling) -> Bounds:
    """Where the output is cut: where the input was, if one size is a multiple of the other."""
    if how.count % how.size == 0:
        return scaled_bounds(bounds, how.count // how.size, how.count)
    if how.size % how.count == 0:
        return strided_bounds(bounds, how.size // how.count, how.count)
    return even_bounds(how.count, len(bounds) - 1)


def _output(layout: Layout, rows: Resampling, cols: Resampling) -> Layout:
    return Layout((0, 1), _bounds(layout.rows, rows), _bounds(layout.cols, cols))


# --- by PyTorch's kernel


def _kernel_needs(bounds: Bounds, how: Resampling) -> list[tuple[int, int]]:
    halo = HALO[how.mode] if how.factor > 1 else 0
    return [
        (max(start // how.factor - halo, 0), min(-(-stop // how.factor) + halo, how.size))
        if start < stop
        else (0, 0)
        for start, stop in pairwise(bounds)
    ]


@lru_cache(maxsize=4096)
def _kernel_plan(layout: Layout, rows: Resampling, cols: Resampling, part: int) -> Plan:
    output = _output(layout, rows, cols)
    needed = tuple(
        Box(0, 1, *row, *col)
        for row in _kernel_needs(output.rows, rows)
        for col in _kernel_needs(output.cols, cols)
    )
    return plan_for(one_sample(layout).boxes, needed, part)


def _by_kernel(x: SpatialTensor, rows: Resampling, cols: Resampling) -> SpatialTensor:
    output = _output(x.spatial_layout, rows, cols)
    plan = _kernel_plan(x.spatial_layout, rows, cols, x.mesh.part)
    window = fetch(to_tile(x), plan, x.mesh, name="interpolate")
    own, need = output.boxes[x.mesh.part], plan.need
    if own.is_empty:
        tile = nothing((*window.shape[:2], *own.shape[1:]), window)
        return from_tile(tile, output, x.mesh)
    size = [rows.factor * window.shape[-2], cols.factor * window.shape[-1]]
    corners = () if rows.mode.startswith("nearest") else (False,)
    grown = KERNELS[rows.mode](window, size, *corners, None, None)
    row0, col0 = own.row0 - rows.factor * need.row0, own.col0 - cols.factor * need.col0
    tile = grown[..., row0 : row0 + own.shape[1], col0 : col0 + own.shape[2]]
    if tile.shape != grown.shape:
        tile = tile.clone()  # or the outputs that are not ours would be kept too
    elif tile is window:
        tile = window.clone()
    return from_tile(tile, output, x.mesh)


# --- by a table


class _Move(NamedTuple):
    """What a rank fetches, and its own outputs."""

    plan: Plan
    own: Box


@lru_cache(maxsize=4096)
def _move(
    layout: Layout, rows: Resampling, cols: Resampling, dtype: torch.dtype, part: int
) -> _Move:
    output = _output(layout, rows, cols)
    row_taps, col_taps = taps_of(rows, dtype), taps_of(cols, dtype)
    needed = tuple(
        Box(0, 1, *row, *col)
        for row in [row_taps.reads(*interval) for interval in pairwise(output.rows)]
        for col in [col_taps.reads(*interval) for interval in pairwise(output.cols)]
    )
    return _Move(plan_for(one_sample(layout).boxes, needed, part), output.boxes[part])


def _by_table(x: SpatialTensor, rows: Resampling, cols: Resampling) -> SpatialTensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    plan, own = _move(x.spatial_layout, rows, cols, dtype, x.mesh.part)
    window = fetch(to_tile(x), plan, x.mesh, name="interpolate")
    exact = window if rows.mode.startswith("nearest") else window.to(dtype)
    need = plan.need
    high = _add_up(exact, taps_of(rows, dtype), (own.row0, own.row1), need.row0, -2)
    tile = _add_up(high, taps_of(cols, dtype), (own.col0, own.col1), need.col0, -1)
    return from_tile(
        tile.to(x.dtype), _output(x.spatial_layout, rows, cols), x.mesh, x.spatial_dims
    )


def _add_up(window: Tensor, taps: Taps, outputs: tuple[int, int], origin: int, dim: int) -> Tensor:
    """Outputs [start, stop) of one dim, from a window that begins at input `origin`."""
    part = slice(*outputs)
    index = (taps.index[part] - origin).to(window.device)
    if taps.weight is None:
        return window.index_select(dim, index[:, 0])
    weight = taps.weight[part].to(window.device)
    if dim == -2:
        weight = weight[:, :, None]
    total = window.index_select(dim, index[:, 0]) * weight[:, 0]
    for tap in range(1, index.shape[1]):
        total = total + window.index_select(dim, index[:, tap]) * weight[:, tap]
    return total


# --- the names that torch.nn.functional.interpolate calls

nn = torch._C._nn
KERNELS: dict[str, Call] = {
    "nearest": nn.upsample_nearest2d,
    "nearest-exact": nn._upsample_nearest_exact2d,
    "linear": nn.upsample_bilinear2d,
    "cubic": nn.upsample_bicubic2d,
}
ANTIALIASED: dict[str, Call] = {
    "linear": nn._upsample_bilinear2d_aa,
    "cubic": nn._upsample_bicubic2d_aa,
}


def _register(mode: str, function: Call, antialias: bool) -> None:
    if mode.startswith("nearest"):

        @register_op(function, split=("input",))
        def nearest(input: SpatialTensor, size: Any, *scales: Any) -> Tensor:
            return _resampling(function, mode, input, (size, *scales), False, antialias)

    else:

        @register_op(function, split=("input",))
        def smooth(input: SpatialTensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
            return _resampling(function, mode, input, (size, *scales), align_corners, antialias)


for _mode, _function in KERNELS.items():
    _register(_mode, _function, False)
for _mode, _function in ANTIALIASED.items():
    _register(_mode, _function, True)
