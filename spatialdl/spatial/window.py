"""What operations with a window share: the output layout, and a tile with its halo."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import move, view_of
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.parallel.layout import (
    Layout,
    Window,
    by,
    image_shape,
    needed_boxes,
    spatial_names,
)
from spatialdl.spatial.tensor import SpatialTensor


class WindowMove(NamedTuple):
    """The layout of an operation's output, the plan that brings what it reads, the input's size."""

    output: Layout
    plan: Plan
    size: tuple[int, ...]


@lru_cache(maxsize=4096)
def window_move(
    layout: Layout, windows: tuple[Window, ...], size: tuple[int, ...], part: int
) -> WindowMove:
    """How an operation with windows, one a dim, turns an image on `layout` into one of `size`."""
    output = layout.strided([window.stride for window in windows], size)
    plan = plan_for(layout.boxes, needed_boxes(output, windows), part)
    return WindowMove(output, plan, layout.size)


def per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """PyTorch's `int or (int, int)`: a number for each of so many spatial dims."""
    if isinstance(value, int):
        return (value,) * dims
    values = tuple(map(int, value))
    if len(values) not in (1, dims):
        raise ValueError(f"expected one number or {dims}, got {values}")
    return values * dims if len(values) == 1 else values


def autocast_cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Operands of a convolution or product in the type that autocast gives them.

    Before anything is exchanged: half as many bytes travel, and backward sees what forward saw.
    """
    kind = next(x.device.type for x in tensors if x is not None)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def check_image(name: str, x: SpatialTensor, dims: int) -> None:
    """Refuse what is no (N, C, *spatial) with so many spatial dims, all of them split."""
    takes = image_shape(dims)
    if len(x.mesh.grid) != dims:
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes {takes}, got {tuple(x.shape)} split {x.describe()}: "
            f"its grid must have {dims} numbers, as {(*(1,) * (dims - 1), x.mesh.grid_comm.size)}"
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


def check_output(name: str, x: SpatialTensor, size: tuple[int, ...]) -> None:
    """Refuse a window larger than the image, as PyTorch does."""
    if min(size) < 1:
        raise ValueError(
            f"{name}: the window is larger than the image: input {tuple(x.shape)} gives an "
            f"output of {by(size)} pixels; use larger images or fewer strides"
        )


def read_window(tile: Tensor, mesh: Mesh, plan: Plan, name: str) -> Tensor:
    """The box that this rank needs: a view where nobody talks and the tile holds all of it."""
    if not plan.communicates and holds_all(plan):
        return view_of(tile, plan.own, plan.need)
    return move(mesh.grid_comm, plan, tile, name=name)


def holds_all(plan: Plan) -> bool:
    """Whether this rank's tile holds all that it needs."""
    return plan.kept == plan.need and not plan.need.is_empty


class _Nothing(torch.autograd.Function):
    """An output without pixels, kept in the graph so that all ranks walk the same graph.

    It saves its inputs, as the operation does on ranks that have pixels: under checkpointing,
    which runs the forward again when it first wants something saved, all ranks come to that at the
    same place.
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(value) for value in ctx.saved_tensors)


def nothing(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """An empty tensor of `shape`; its backward gives zeros to all `inputs`."""
    empty: Tensor = _Nothing.apply(shape, *inputs)  # type: ignore[no-untyped-call]
    return empty
