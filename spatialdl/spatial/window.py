"""What operations with a window share: the output layout, and a tile with its halo."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import move, view_of
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout import Layout, Window, needed_boxes
from spatialdl.mesh import Mesh
from spatialdl.spatial.dims import IMAGE
from spatialdl.spatial.tensor import SpatialTensor


class WindowMove(NamedTuple):
    """The layout of an operation's output, and the plan that brings what it reads."""

    output: Layout
    plan: Plan


@lru_cache(maxsize=4096)
def window_move(
    layout: Layout, rows: Window, cols: Window, size: tuple[int, int], part: int
) -> WindowMove:
    """How an operation with a window turns an image on `layout` into one of `size` (H, W)."""
    output = layout.strided((rows.stride, cols.stride), size)
    return WindowMove(output, plan_for(layout.boxes, needed_boxes(output, rows, cols), part))


def pair(value: Any) -> tuple[int, int]:
    """PyTorch's `int or (int, int)`."""
    if isinstance(value, int):
        return value, value
    first, second = (value[0], value[0]) if len(value) == 1 else value
    return int(first), int(second)


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


def check_image(name: str, x: SpatialTensor) -> None:
    """Refuse what is no (N, C, H, W)."""
    if x.dim() != 4:
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes (N, C, H, W), got {tuple(x.shape)}: add the missing "
            "dim before the image is split"
        )
    if x.spatial_dims != IMAGE:
        raise UnsupportedSpatialOp(
            f"{name} on a split image takes (N, C, H, W), got {tuple(x.shape)} split "
            f"{x.describe()}: permute or view it so that rows and columns are the last two dims"
        )


def check_output(name: str, x: SpatialTensor, size: tuple[int, int]) -> None:
    """Refuse a window larger than the image, as PyTorch does."""
    if min(size) < 1:
        raise ValueError(
            f"{name}: the window is larger than the image: input {tuple(x.shape)} gives an "
            f"output of {size[0]}x{size[1]} pixels; use larger images or fewer strides"
        )


def read_window(tile: Tensor, mesh: Mesh, plan: Plan, name: str, fill: float = 0.0) -> Tensor:
    """The box that this rank needs: a view where nobody talks and the tile holds all of it."""
    if not plan.talks and holds_all(plan):
        return view_of(tile, plan.own, plan.need)
    return move(mesh.grid_comm, plan, tile, fill, name)


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
