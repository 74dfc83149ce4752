"""Splitting an image over a mesh (`shard`, `from_local`), and gathering it before a module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import move, view_of
from spatialdl.layout.layout import Layout, by, image_shape
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.tensor import SpatialTensor, from_tile
from spatialdl.torch_internals import tree_map


class _Shard(torch.autograd.Function):
    """Backward returns on every rank the whole gradient of the mean of the ranks' losses."""

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
    """Backward divides by the number of ranks: the objective is the mean of their losses."""

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

    Collective over the grid. The ranks' images are compared in the first steps and then
    occasionally.

    Args:
        image: (N, C, *spatial), e.g. (N, C, H, W), with one spatial dim per grid axis; or
            (N, *spatial) for maps of integers. The same on every rank of the grid. If it requires
            a gradient, backward returns that of the whole image on every rank.
        mesh: the ranks.

    Raises:
        ValueError: a spatial dim is smaller than the grid, or the ranks' images differ.
    """
    if mesh.agreement is not None and not isinstance(image, SpatialTensor):
        mesh.agreement.images(image)
    layout = _layout_for(image, tuple(image.shape[-len(mesh.grid) :]), mesh)
    tile = _Shard.apply(image, layout, mesh)  # type: ignore[no-untyped-call]
    return from_tile(tile, layout, mesh)


def from_local(tile: Tensor, mesh: Mesh, size: Sequence[int]) -> SpatialTensor:
    """Create a split image from the ranks' tiles; collective over the grid.

    Args:
        tile: (N, C, *spatial) or (N, *spatial): this rank's box ``mesh.box(size)``.
        mesh: the ranks.
        size: of the spatial dims of the whole image, e.g. (H, W).

    Raises:
        ValueError: the tile does not have the shape of this rank's box, or image size, samples,
            channels or dtype differ between ranks.
    """
    if isinstance(size, int):
        raise ValueError(
            f"from_local expects a size for each spatial dim: the grid is {mesh.grid}, got {size}"
        )
    if mesh.agreement is not None and not isinstance(tile, SpatialTensor):
        mesh.agreement.tiles(tile, size)
    size = tuple(map(int, size))
    layout = _layout_for(tile, size, mesh)
    extents, wanted = tuple(tile.shape[-len(size) :]), mesh.own_box(layout).shape[1:]
    if extents != wanted:
        raise ValueError(
            f"rank {mesh.comm.rank} has a tile of {by(extents)}, but its box of the {by(size)} "
            f"image is {mesh.box(size)}, of {by(wanted)}: cut the tile by mesh.box(size)"
        )
    own = _OwnTile.apply(tile, mesh.size)  # type: ignore[no-untyped-call]
    return from_tile(own, layout, mesh)


def _layout_for(tensor: Tensor, size: tuple[int, ...], mesh: Mesh) -> Layout:
    dims = len(mesh.grid)
    if len(size) != dims or tensor.dim() not in (dims + 1, dims + 2):
        shape = image_shape(dims)
        raise ValueError(
            f"an image to split over a grid of {by(mesh.grid)} must be {shape} or "
            f"{shape.replace(' C,', '')}, got shape {tuple(tensor.shape)} and size {by(size)}"
        )
    if isinstance(tensor, SpatialTensor):
        raise ValueError("the image is already split")
    if any(extent < parts for extent, parts in zip(size, mesh.grid, strict=True)):
        raise ValueError(
            f"an image of {by(size)} is smaller than the grid {by(mesh.grid)}: use a smaller "
            "grid or larger images"
        )
    return mesh.layout(tensor.shape[0], size)


def as_image(value: Any) -> Any:
    """An output of a network; tokens of a split image are gathered to a whole tensor."""
    if isinstance(value, SpatialTensor):
        dims = image_dims(len(value.mesh.grid))
        if value.spatial_dims != dims or value.spatial_layout.size != tuple(value.shape[2:]):
            return value.full_tensor()
    return value


# --- before a module that the user names


Names = str | int | Iterable[str | int] | None


def module_names(names: Names) -> list[str]:
    """Names of modules from a configuration, where those of a chain are numbers."""
    if names is None:
        return []
    return [str(one) for one in ([names] if isinstance(names, str | int) else names)]


def gather_before(model: nn.Module, name: Names) -> None:
    """Pass whole images, the same on every rank, to a module instead of split ones.

    Use it before an operation that is not supported on a split image: from there on every rank
    holds and computes the whole image. Gradients are exact. Plain tensors are passed unchanged.

    Args:
        model: the network.
        name: of the module, as in ``model.named_modules()``; or several names, or None.

    Raises:
        ValueError: no such module; the message lists similar names.
    """
    for one in module_names(name):
        _first_layer(_find_module(model, one)).register_forward_pre_hook(
            _gather, prepend=True, with_kwargs=True
        )


def _find_module(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name and name in modules:
        return modules[name]
    names = [known for known in modules if known]
    near = get_close_matches(name, names, n=5, cutoff=0.5)
    near += [known for known in names if name and name in known and known not in near]
    some = ", ".join(near[:8] or [known for known in names if "." not in known])
    raise ValueError(
        f"gather_before: {type(model).__name__} has no module '{name}'; "
        f"{'similar names' if near else 'its modules'}: {some}"
    )


def _first_layer(module: nn.Module) -> nn.Module:
    """The first called module: stages of a chain call its layers, not the chain."""
    while type(module).forward is nn.Sequential.forward and len(module._modules) > 0:
        module = next(child for child in module._modules.values() if child is not None)
    return module


def _gather(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    gathered: tuple[Any, Any] = tree_map(
        lambda value: value.full_tensor() if isinstance(value, SpatialTensor) else value,
        (args, kwargs),
    )
    return gathered
