"""Splitting an image over a mesh: `shard` and `from_local`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import move, view_of
from spatialdl.layout import Layout
from spatialdl.mesh import Mesh
from spatialdl.spatial.tensor import SpatialTensor, from_tile


class _Shard(torch.autograd.Function):
    """Backward gives every rank the whole gradient of the mean of the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        return view_of(image, layout.whole, mesh.own_box(layout)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, mesh = ctx.layout, ctx.mesh
        plan = plan_for(layout.boxes, (layout.whole,) * len(layout.boxes), mesh.part)
        whole = move(mesh.grid_comm, plan, grad, name="shard backward")
        return whole / mesh.size, None, None


class _OwnTile(torch.autograd.Function):
    """Backward divides by the ranks, because the objective is the mean of their losses."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tile.view_as(tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad / ctx.ranks, None


def shard(image: Tensor, mesh: Mesh) -> SpatialTensor:
    """Split an image over the grid of a mesh; every rank keeps its own box.

    Every rank of the grid must call it. In the first steps, and then now and then, their images are
    compared.

    Args:
        image: (N, C, H, W), or (N, H, W) for maps of integers; the same on every rank of the
            grid. Needs no gradient unless you want one: then backward gives every rank the
            gradient of the whole image.
        mesh: the ranks.

    Raises:
        ValueError: if the image has fewer rows or columns than the grid, or ranks have other ones.
    """
    if mesh.agreement is not None and not isinstance(image, SpatialTensor):
        mesh.agreement.images(image)
    layout = _layout_for(image, tuple(image.shape[-2:]), mesh)
    tile = _Shard.apply(image, layout, mesh)  # type: ignore[no-untyped-call]
    return from_tile(tile, layout, mesh)


def from_local(tile: Tensor, mesh: Mesh, size: tuple[int, int]) -> SpatialTensor:
    """Make one split image of the tiles that the ranks hold; all of the grid must call it.

    Args:
        tile: (N, C, h, w) or (N, h, w): this rank's box ``mesh.box(size)``.
        mesh: the ranks.
        size: (H, W) of the whole image.

    Raises:
        ValueError: if the tile has not the shape of this rank's box, or ranks bring tiles of
            images that have other sizes, samples, channels or types.
    """
    if mesh.agreement is not None and not isinstance(tile, SpatialTensor):
        mesh.agreement.tiles(tile, size)
    layout = _layout_for(tile, (int(size[0]), int(size[1])), mesh)
    box = mesh.own_box(layout)
    if tuple(tile.shape[-2:]) != box.shape[1:]:
        raise ValueError(
            f"rank {mesh.comm.rank} brings a tile of {tile.shape[-2]}x{tile.shape[-1]}, but its "
            f"box of the {size[0]}x{size[1]} image is {mesh.box((size[0], size[1]))}, that is "
            f"{box.shape[1]}x{box.shape[2]}: cut the tile by mesh.box(size)"
        )
    own = _OwnTile.apply(tile, mesh.size)  # type: ignore[no-untyped-call]
    return from_tile(own, layout, mesh)


def _layout_for(tensor: Tensor, size: tuple[int, ...], mesh: Mesh) -> Layout:
    if tensor.dim() not in (3, 4):
        raise ValueError(
            f"an image to be split is (N, C, H, W) or (N, H, W), got shape {tuple(tensor.shape)}"
        )
    if isinstance(tensor, SpatialTensor):
        raise ValueError("this image is split already")
    rows, cols = mesh.grid
    if size[0] < rows or size[1] < cols:
        raise ValueError(
            f"an image of {size[0]}x{size[1]} is smaller than the grid {rows}x{cols}: use a "
            "smaller grid or larger images"
        )
    return mesh.layout((tensor.shape[0], size[0], size[1]))
