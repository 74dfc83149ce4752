"""Output layouts and halo exchange, shared by operations with a window."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import move, view_of
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.layout import (
    Layout,
    Window,
    by,
    image_shape,
    needed_boxes,
    spatial_names,
)
from spatialdl.spatial.tensor import SpatialTensor


class WindowMove(NamedTuple):
    """The layout of the output, and the plan that fetches its inputs."""

    output: Layout
    plan: Plan


@lru_cache(maxsize=4096)
def window_move(
    layout: Layout, windows: tuple[Window, ...], size: tuple[int, ...], part: int
) -> WindowMove:
    """The move for windows, one per dim, over an image on `layout` to an output of `size`."""
    output = layout.strided([window.stride for window in windows], size)
    plan = plan_for(layout.boxes, needed_boxes(output, windows), part)
    return WindowMove(output, plan)


def windows_of(
    name: str, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Window, ...]:
    """The window along each of `dims` spatial dims, from PyTorch's arguments."""
    values = (per_dim(value, dims) for value in (kernel, stride, padding, dilation))
    windows = tuple(map(Window, *values))
    for window in windows:
        if min(window.kernel, window.stride, window.dilation) < 1 or window.padding < 0:
            raise ValueError(
                f"{name}: kernel, stride and dilation must be at least 1, padding at least 0; got "
                f"{window}"
            )
    return windows


def plan_windows(
    name: str,
    x: SpatialTensor,
    windows: tuple[Window, ...],
    ceil_mode: bool = False,
    size: tuple[int, ...] | None = None,
) -> WindowMove:
    """The move for an operation with windows on an image; checks both.

    Args:
        size: of the output, if it does not follow from the windows.
    """
    check_image(name, x, len(windows))
    size = size or tuple(
        window.output_size(pixels, ceil_mode)
        for window, pixels in zip(windows, x.shape[2:], strict=True)
    )
    if min(size) < 1:
        raise ValueError(
            f"{name}: the window is larger than the image: input {tuple(x.shape)} gives an "
            f"output of {by(size)} pixels; use larger images or fewer strides"
        )
    return window_move(x.spatial_layout, windows, size, x.mesh.part)


def per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """PyTorch's `int or (int, int)` as one number for each of `dims` spatial dims."""
    if isinstance(value, int):
        return (value,) * dims
    values = tuple(map(int, value))
    if len(values) not in (1, dims):
        raise ValueError(f"expected 1 or {dims} numbers, got {values}")
    return values * dims if len(values) == 1 else values


def check_image(name: str, x: SpatialTensor, dims: int) -> None:
    """Refuse a tensor that is not (N, C, *spatial) with `dims` spatial dims, all split."""
    takes = image_shape(dims)
    if len(x.mesh.grid) != dims:
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes {takes}, got {tuple(x.shape)} split {x.describe()}: "
            f"the grid must have {dims} axes, as {(*(1,) * (dims - 1), x.mesh.grid_comm.size)}"
        )
    if x.dim() != dims + 2:
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes {takes}, got {tuple(x.shape)}: add the missing "
            "dim before the image is split"
        )
    if not x.spatial_dims.is_image:
        names = " and ".join(spatial_names(dims))
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes {takes}, got {tuple(x.shape)} split "
            f"{x.describe()}: permute or view it so that {names} are the last dims"
        )


def read_window(tile: Tensor, mesh: Mesh, plan: Plan, name: str, fill: float = 0.0) -> Tensor:
    """The box that this rank needs: a view if no rank sends and the tile contains it."""
    if not plan.communicates and holds_all(plan):
        return view_of(tile, plan.own, plan.need)
    return move(mesh.grid_comm, plan, tile, fill, name)


def holds_all(plan: Plan) -> bool:
    """Whether this rank's tile contains the box that it needs."""
    return plan.kept == plan.need and not plan.need.is_empty


class _EmptyOutput(torch.autograd.Function):
    """An output without pixels, in the graph so that all ranks have the same graph.

    It saves its inputs as the operation does on ranks with pixels. Checkpointing recomputes a
    forward at the first access to a saved tensor, so all ranks recompute at the same node.
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(value) for value in ctx.saved_tensors)


def empty_output(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """An empty tensor of `shape`; its backward returns zeros for all `inputs`."""
    empty: Tensor = _EmptyOutput.apply(shape, *inputs)  # type: ignore[no-untyped-call]
    return empty
