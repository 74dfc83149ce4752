"""Unfold (the pixels of each window) and fold (the sum over overlapping windows)."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import move, move_back, repartition
from spatialdl.layout.layout import Layout, Window, by, needed_boxes
from spatialdl.spatial.dims import are_tokens, image_dims, token_dims
from spatialdl.spatial.reindex import fetch, separate_dims_of
from spatialdl.spatial.sharing import share
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, image_of, to_tile
from spatialdl.spatial.window import (
    WindowMove,
    empty_output,
    per_dim,
    plan_windows,
    window_move,
    windows_of,
)
from spatialdl.torch_internals import nn_functions


@register_op(F.unfold, nn_functions.im2col, split=("input",))
def unfold(
    input: SpatialTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """(N, C, H, W) to (N, C * kernel rows * kernel columns, outputs), outputs row by row."""
    windows, mesh = windows_of("unfold", 2, kernel_size, stride, padding, dilation), input.mesh
    output, plan = plan_windows("unfold", input, windows)
    window = repartition(to_tile(input), mesh.grid_comm, plan, name="unfold")
    own = mesh.own_box(output)
    if own.is_empty:
        values_of_one = input.shape[1] * prod(each.kernel for each in windows)
        tokens = empty_output((input.shape[0], values_of_one, 0), window)
    else:
        tokens = F.unfold(window, **_steps_of(windows))
    return from_tile(tokens, output, mesh, token_dims(2))


@register_op(Tensor.unfold, split=("input",))
def windows_along(input: SpatialTensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, with their pixels in a new last dim."""
    dim = dimension % input.dim() - input.dim()
    layout, mesh = input.spatial_layout, input.mesh
    moved = input.spatial_dims.map_dims(lambda old: old - 1)
    if dim not in input.spatial_dims.at:
        return from_tile(to_tile(input).unfold(dim, size, step), layout, mesh, moved)
    dims = separate_dims_of(Tensor.unfold, input)
    along, last = dims.index(dim), image_dims(len(dims)).at
    output, plan = _move_along(layout.of_samples(1), along, Window(size, step), mesh.part)
    image = to_tile(input).movedim(dims, last)
    others, own = image.shape[: -len(dims)], mesh.own_box(output)
    image = fetch(image, plan, mesh, name="unfold")
    if own.is_empty:
        tile = empty_output((*others, *own.shape[1:], size), image)
    else:
        tile = image.unfold(last[along], size, step)
    windows = from_tile(
        tile.movedim([at - 1 for at in last], [at - 1 for at in dims]), output, mesh, moved
    )
    if mesh.grid_comm.size > 1:
        share(input, windows, moved=True)
    return windows


@lru_cache(maxsize=4096)
def _move_along(layout: Layout, along: int, window: Window, part: int) -> WindowMove:
    """The move for windows along one spatial dim."""
    windows = [Window(1)] * len(layout.cuts)
    windows[along] = window
    sizes = [each.output_size(pixels) for each, pixels in zip(windows, layout.size, strict=True)]
    return window_move(layout, tuple(windows), tuple(sizes), part)


@lru_cache(maxsize=4096)
def fold_move(
    layout: Layout, windows: tuple[Window, ...], size: tuple[int, ...], part: int
) -> WindowMove:
    """The move for folding tokens on `layout` to an image of `size` (H, W).

    The plan leads from tiles of the image to the pixels of the windows. Its adjoint sums the
    windows of all ranks into the image.
    """
    image = layout.scaled([window.stride for window in windows], size)
    return WindowMove(image, plan_for(image.boxes, needed_boxes(layout, windows), part))


class _Fold(torch.autograd.Function):
    """The adjoint of fetching the windows and unfolding them; saves no tokens."""

    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, mesh: Mesh, plan: Plan, windows: tuple[Window, ...]
    ) -> Tensor:
        ctx.mesh, ctx.plan, ctx.steps, ctx.shape = mesh, plan, _steps_of(windows), tile.shape
        samples, *size = plan.need.shape
        if tile.numel() > 0:
            folded = F.fold(tile, tuple(size), **ctx.steps)
        else:
            channels = tile.shape[1] // prod(window.kernel for window in windows)
            folded = tile.new_zeros(samples, channels, *size)
        return move_back(mesh.grid_comm, plan, folded, "fold")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        windows = move(ctx.mesh.grid_comm, ctx.plan, grad, 0.0, "fold")
        if windows.numel() > 0:
            grad_tile = F.unfold(windows, **ctx.steps)
        else:
            grad_tile = grad.new_zeros(ctx.shape)
        return grad_tile, None, None, None


def _steps_of(windows: tuple[Window, ...]) -> dict[str, tuple[int, ...]]:
    """The arguments of `F.fold`; padding is handled by the plan."""
    return {
        "kernel_size": tuple(window.kernel for window in windows),
        "dilation": tuple(window.dilation for window in windows),
        "stride": tuple(window.stride for window in windows),
    }


@register_op(F.fold, nn_functions.col2im, split=("input",))
def fold(
    input: SpatialTensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Tensor:
    """(N, C * kernel rows * kernel columns, outputs) to (N, C, H, W), overlaps summed."""
    if len(input.mesh.grid) != 2 or not are_tokens(input.shape, input.spatial_dims):
        raise refusal(F.fold, [input], "it takes tokens (N, C * kernel size, outputs) of unfold")
    windows = windows_of("fold", 2, kernel_size, stride, padding, dilation)
    size = per_dim(output_size, 2)
    outputs = tuple(map(Window.output_size, windows, size))
    layout, mesh = input.spatial_layout, input.mesh
    if layout.size != outputs:
        raise refusal(F.fold, [input], f"expected {by(outputs)} windows")
    image, plan = fold_move(layout, windows, size, mesh.part)
    tile = image_of(input).flatten(2)
    folded = _Fold.apply(tile, mesh, plan, windows)  # type: ignore[no-untyped-call]
    return from_tile(folded, image, mesh)
