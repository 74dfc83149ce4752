"""Interpolation of split images: nearest, linear to trilinear, bicubic, by size or scale.

For integer factors PyTorch's kernel runs on the tile with its halo. In all other cases each rank
fetches the inputs of its outputs and sums them by a table of global indices and weights. The table
follows PyTorch's arithmetic (aten/src/ATen/native/UpSample.h and cpu/UpSampleKernel.cpp) in global
indices, so that each rank computes its part of the table of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.layout.layout import (
    Bounds,
    Box,
    Layout,
    even_bounds,
    last_slices,
    scaled_bounds,
    strided_bounds,
)
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.reindex import fetch
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.spatial.window import check_image, empty_output
from spatialdl.torch_internals import nn_functions

# --- the table: the inputs of each output of one dim, and their weights


CUBIC = -0.75
CUBIC_ANTIALIAS = -0.5
"""The constant of the cubic kernel (Keys 1981); PyTorch's differs for antialiasing."""


@dataclass(frozen=True)
class ResampledDim:
    """The resampling of one dim.

    Attributes:
        mode: nearest, nearest-exact, linear or cubic.
        size: number of inputs.
        count: number of outputs.
        scale: the user's scale factor, outputs per input; or None.
        dims: spatial dims of the image.
    """

    mode: str
    size: int
    count: int
    align_corners: bool = False
    antialias: bool = False
    scale: float | None = None
    dims: int = 2

    @property
    def factor(self) -> int:
        """Outputs per input if an integer, without align_corners and antialias; else 0."""
        whole = self.count % self.size == 0 and not self.align_corners and not self.antialias
        factor = self.count // self.size
        return factor if whole and self.scale in (None, factor) else 0

    def step(self, dtype: torch.dtype) -> Tensor:
        """Inputs per output."""
        if self.align_corners:
            exact = (self.size - 1) / (self.count - 1) if self.count > 1 else 0.0
        elif self.scale is not None and self.scale > 0:
            exact = 1.0 / self.scale
        else:
            exact = self.size / self.count
        return torch.tensor(exact, dtype=dtype)


@dataclass(frozen=True, eq=False)
class InterpolationWeights:
    """Indices (outputs, taps) of the inputs, and their weights (None: one tap, weight 1)."""

    index: Tensor
    weight: Tensor | None

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """The interval of inputs that outputs [start, stop) read."""
        if stop <= start:
            return 0, 0
        part = self.index[start:stop]
        return int(part.min()), int(part.max()) + 1


@lru_cache(maxsize=512)
def interpolation_weights(how: ResampledDim, dtype: torch.dtype) -> InterpolationWeights:
    """The table of all outputs; weights in `dtype`, float32 or float64."""
    if how.mode.startswith("nearest"):
        return InterpolationWeights(_nearest(how, dtype), None)
    if how.antialias and how.size == how.count:
        every = torch.arange(how.count).view(-1, 1)
        return InterpolationWeights(every, torch.ones(every.shape, dtype=dtype))
    if how.antialias:
        return _antialias(how, dtype)
    step, outputs = how.step(dtype), torch.arange(how.count, dtype=dtype)
    centre = outputs * step if how.align_corners else step * (outputs + 0.5) - 0.5
    if how.mode == "linear":
        if how.size == how.count:
            centre = outputs
        centre = centre.clamp(min=0)
    first = centre.floor().clamp(max=how.size - 1)
    shift = (centre - first).clamp(0, 1)
    if how.mode == "linear":
        reach, weights = (0, 1), [1 - shift, shift]
    else:
        reach = (-1, 2)
        weights = [_cubic(shift - k, CUBIC) for k in range(-1, 3)]
    index = first.long()[:, None] + torch.arange(reach[0], reach[1] + 1)
    return InterpolationWeights(index.clamp(0, how.size - 1), torch.stack(weights, 1))


def _nearest(how: ResampledDim, dtype: torch.dtype) -> Tensor:
    """Indices computed by PyTorch, whose rounding differs between images and other inputs."""
    others = [1] * (how.dims - 1)
    column = torch.arange(how.size, dtype=dtype).view(1, 1, -1, *others)
    exact = "_exact" if how.mode == "nearest-exact" else ""
    kernel = getattr(nn_functions, f"{exact and '_'}upsample_nearest{exact}{how.dims}d")
    scales = None if how.scale is None else [how.scale, *map(float, others)]
    indices: Tensor = kernel(column, None if scales else [how.count, *others], scales)
    return indices.view(-1, 1).long()


def _cubic(x: Tensor, a: float) -> Tensor:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _antialias(how: ResampledDim, dtype: torch.dtype) -> InterpolationWeights:
    """Antialiased weights: the kernel is widened by the step if the image shrinks."""
    step = how.step(dtype)
    wide = step.clamp(min=1)
    support = wide * (1 if how.mode == "linear" else 2)
    centre = step * (torch.arange(how.count, dtype=dtype) + 0.5)
    first = (centre - support + 0.5).trunc().long().clamp(min=0)
    last = (centre + support + 0.5).trunc().long().clamp(max=how.size)
    places = torch.arange(int((last - first).max()))
    index = first[:, None] + places
    x = (index.to(dtype) - centre[:, None] + 0.5) / wide
    weight = (1 - x.abs()).clamp(min=0) if how.mode == "linear" else _cubic(x, CUBIC_ANTIALIAS)
    weight = torch.where(index < last[:, None], weight, torch.zeros_like(weight))
    index = torch.minimum(index, last[:, None] - 1).clamp(min=0)
    return InterpolationWeights(index, weight / weight.sum(1, keepdim=True))


# --- the operations


Call = Callable[..., Any]
HALO = {"nearest": 0, "nearest-exact": 0, "linear": 1, "cubic": 2}
"""Halo width of the inputs if an image is enlarged by an integer factor."""


def _resampling(
    function: Call,
    mode: str,
    input: SpatialTensor,
    arguments: Sequence[Any],
    align_corners: bool,
    antialias: bool,
) -> Tensor:
    """Interpolate; `arguments` are (size, scale factors) or (size, a scale for each dim)."""
    dims = KERNEL_DIMS[function]
    check_image(function.__name__, input, dims)
    corners = () if mode.startswith("nearest") else (align_corners,)
    size, *scales = arguments
    whole = meta_result(function, input, size, *corners, *scales)
    is_list = len(scales) == 1 and not isinstance(scales[0], float)
    factors = scales[0] if is_list else scales
    each = tuple(
        ResampledDim(mode, n, m, align_corners, antialias, scale, dims)
        for n, m, scale in zip(
            input.shape[2:], whole.shape[2:], factors or (None,) * dims, strict=True
        )
    )
    if mode in ("linear", "cubic") and not input.is_floating_point():
        raise refusal(function, [input], "convert it to a floating-point type first")
    if antialias and each[-1].count == 1:
        raise refusal(
            function, [input], "PyTorch is wrong for an output of one column; two are exact"
        )
    if input.requires_grad:
        _check_gradient(function, input, each)
    fast = _by_kernel(input, each) if all(how.factor for how in each) else None
    return fast if fast is not None else _by_table(input, each)


def _check_gradient(function: Call, input: SpatialTensor, each: tuple[ResampledDim, ...]) -> None:
    """Refuse a scale factor that keeps the size: PyTorch 2.13 copies in one direction only.

    This concerns each dim separately with antialiasing, and with nearest in signals and volumes;
    and bicubic images if both sizes are kept.
    """
    kept = [how for how in each if how.size == how.count]
    scaled = [how.scale for how in kept if not how.align_corners and how.scale not in (None, 1.0)]
    all_cubic = each[0].mode == "cubic" and len(kept) == len(each)
    in_each_dim = each[0].antialias or (each[0].mode == "nearest" and len(each) != 2)
    if scaled and (in_each_dim or all_cubic):
        raise refusal(
            function,
            [input],
            f"PyTorch's own gradient is wrong where a scale factor of {scaled[0]} keeps the size; "
            "give size=, or recompute_scale_factor=True",
        )


def _bounds(bounds: Bounds, how: ResampledDim) -> Bounds:
    """The cuts of the output: those of the input if one size is a multiple of the other."""
    if how.count % how.size == 0:
        return scaled_bounds(bounds, how.count // how.size, how.count)
    if how.size % how.count == 0:
        return strided_bounds(bounds, how.size // how.count, how.count)
    return even_bounds(how.count, len(bounds) - 1)


def _output(layout: Layout, each: tuple[ResampledDim, ...]) -> Layout:
    return Layout((0, 1), tuple(map(_bounds, layout.cuts, each)))


# --- by PyTorch's kernel


def _kernel_needs(bounds: Bounds, how: ResampledDim) -> list[tuple[int, int]]:
    halo = HALO[how.mode] if how.factor > 1 else 0
    return [
        (max(start // how.factor - halo, 0), min(-(-stop // how.factor) + halo, how.size))
        if start < stop
        else (0, 0)
        for start, stop in pairwise(bounds)
    ]


@lru_cache(maxsize=4096)
def _kernel_plan(layout: Layout, each: tuple[ResampledDim, ...], part: int) -> Plan:
    output = _output(layout, each)
    needs = product(*map(_kernel_needs, output.cuts, each))
    needed = tuple(Box(((0, 1), *intervals)) for intervals in needs)
    return plan_for(layout.of_samples(1).boxes, needed, part)


def _by_kernel(x: SpatialTensor, each: tuple[ResampledDim, ...]) -> SpatialTensor:
    output = _output(x.spatial_layout, each)
    plan = _kernel_plan(x.spatial_layout, each, x.mesh.part)
    window = fetch(to_tile(x), plan, x.mesh, name="interpolate")
    own, need = output.boxes[x.mesh.part], plan.need
    if own.is_empty:
        tile = empty_output((*window.shape[:2], *own.shape[1:]), window)
        return from_tile(tile, output, x.mesh)
    size = [how.factor * pixels for how, pixels in zip(each, window.shape[2:], strict=True)]
    corners = () if each[0].mode.startswith("nearest") else (False,)
    grown = KERNELS[each[0].mode, len(each)](window, size, *corners, *(None,) * len(each))
    inside = (
        slice(start - how.factor * first, stop - how.factor * first)
        for how, (start, stop), (first, _) in zip(each, own.spatial, need.spatial, strict=True)
    )
    tile = grown[last_slices(inside)]
    if tile.shape != grown.shape:
        tile = tile.clone()  # frees the outputs of other ranks
    elif tile is window:
        tile = window.clone()
    return from_tile(tile, output, x.mesh)


# --- by a table


class _Move(NamedTuple):
    """The plan of a rank's inputs, and its own outputs."""

    plan: Plan
    own: Box


@lru_cache(maxsize=4096)
def _move(layout: Layout, each: tuple[ResampledDim, ...], dtype: torch.dtype, part: int) -> _Move:
    output = _output(layout, each)
    reads = [
        [interpolation_weights(how, dtype).reads(*interval) for interval in pairwise(bounds)]
        for how, bounds in zip(each, output.cuts, strict=True)
    ]
    needed = tuple(Box(((0, 1), *intervals)) for intervals in product(*reads))
    return _Move(plan_for(layout.of_samples(1).boxes, needed, part), output.boxes[part])


def _by_table(x: SpatialTensor, each: tuple[ResampledDim, ...]) -> SpatialTensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    plan, own = _move(x.spatial_layout, each, dtype, x.mesh.part)
    tile = fetch(to_tile(x), plan, x.mesh, name="interpolate")
    if not each[0].mode.startswith("nearest"):
        tile = tile.to(dtype)
    for dim, how in enumerate(each, start=-len(each)):
        taps = _own_taps(how, dtype, own[dim], plan.need[dim][0], tile.device)
        tile = _add_up(tile, taps, dim)
    return from_tile(tile.to(x.dtype), _output(x.spatial_layout, each), x.mesh)


@lru_cache(maxsize=1024)
def _own_taps(
    how: ResampledDim,
    dtype: torch.dtype,
    outputs: tuple[int, int],
    origin: int,
    device: torch.device,
) -> InterpolationWeights:
    """The weights of `outputs` [start, stop), for a window that begins at input `origin`."""
    taps, part = interpolation_weights(how, dtype), slice(*outputs)
    with torch.inference_mode(False):
        index = (taps.index[part] - origin).to(device)
        weight = None if taps.weight is None else taps.weight[part].to(device, copy=True)
    return InterpolationWeights(index, weight)


def _add_up(window: Tensor, taps: InterpolationWeights, dim: int) -> Tensor:
    """The outputs along one dim: sums of the inputs weighted by `taps`."""
    index, weight = taps.index, taps.weight
    if weight is None:
        return window.index_select(dim, index[:, 0])
    weight = weight.view(*weight.shape, *(1,) * (-dim - 1))
    total = window.index_select(dim, index[:, 0]) * weight[:, 0]
    for tap in range(1, index.shape[1]):
        total = total + window.index_select(dim, index[:, tap]) * weight[:, tap]
    return total


# --- functions called by torch.nn.functional.interpolate

KERNELS: dict[tuple[str, int], Call] = {
    ("nearest", 1): nn_functions.upsample_nearest1d,
    ("nearest", 2): nn_functions.upsample_nearest2d,
    ("nearest", 3): nn_functions.upsample_nearest3d,
    ("nearest-exact", 1): nn_functions._upsample_nearest_exact1d,
    ("nearest-exact", 2): nn_functions._upsample_nearest_exact2d,
    ("nearest-exact", 3): nn_functions._upsample_nearest_exact3d,
    ("linear", 1): nn_functions.upsample_linear1d,
    ("linear", 2): nn_functions.upsample_bilinear2d,
    ("linear", 3): nn_functions.upsample_trilinear3d,
    ("cubic", 2): nn_functions.upsample_bicubic2d,
}
ANTIALIASED: dict[tuple[str, int], Call] = {
    ("linear", 2): nn_functions._upsample_bilinear2d_aa,
    ("cubic", 2): nn_functions._upsample_bicubic2d_aa,
}
KERNEL_DIMS = {f: dims for table in (KERNELS, ANTIALIASED) for (_, dims), f in table.items()}


def _register(mode: str, function: Call, antialias: bool) -> None:
    @register_op(function, split=("input",))
    def resample(input: SpatialTensor, size: Any, *options: Any) -> Tensor:
        align_corners, *scales = (False, *options) if mode.startswith("nearest") else options
        return _resampling(function, mode, input, (size, *scales), align_corners, antialias)


for (_mode, _), _function in KERNELS.items():
    _register(_mode, _function, False)
for (_mode, _), _function in ANTIALIASED.items():
    _register(_mode, _function, True)
