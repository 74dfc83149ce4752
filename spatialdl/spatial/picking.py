"""Selects pixels along split dims by an index tensor, e.g. the keys of computed windows.

The index may be on a device and is not read by the host. Instead the tiles of all parts circulate,
and each rank selects the inputs of its outputs from each. So it holds two tiles at a time, not the
image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from spatialdl.comm.plan import Plan, plan_for
from spatialdl.layout.layout import Layout
from spatialdl.spatial.constants import on
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.span import positions_in
from spatialdl.spatial.table import refusal
from spatialdl.spatial.tensor import SpatialTensor, from_tile, move_pixels


def pick(func: object, x: SpatialTensor, dim: int, index: Tensor) -> SpatialTensor:
    """`x` indexed by a tensor of any shape (n, ...) along a dim that holds spatial dims.

    Args:
        func: the operation, for messages.
        dim: negative.
        index: integers, the same on every rank; its first dim replaces `dim` as a split dim.
    """
    dims, layout, mesh, size = x.spatial_dims, x.spatial_layout, x.mesh, x.shape[dim]
    held = tuple(number for number, at in enumerate(dims.at) if at == dim)
    if dims.extra_tokens or dims.outer[held[0]] > 1:
        raise refusal(func, [x], "an index may select pixels only, not samples or class tokens")
    if len(held) > 1 and len(index) != size:
        raise refusal(func, [x], f"an index of merged split dims must have {size} rows")
    if index.device.type == "cpu" and index.numel():  # on a device kernels assert
        low, high = map(int, index.aminmax())
        if low < (0 if func is torch.index_select else -size) or high >= size:
            raise IndexError(
                f"index {high if high >= size else low} is out of bounds for dimension "
                f"{dim + x.dim()} with size {size}"
            )
    if mesh.agreement is not None:
        mesh.agreement.operand(index)
    output = layout if len(held) > 1 else layout.resized(held[0], len(index))
    rows = on(positions_in(output, dims, len(index), dim, mesh.part), x.device)
    own = index.to(x.device, torch.int64).index_select(0, rows)
    own = torch.where(own < 0, own + size, own)
    tile = _pick_from_parts(x, dim, held, own.flatten(), getattr(func, "__name__", str(func)))
    more = own.dim() - 1
    moved = dims.map_dims(lambda at: at - more if at <= dim else at)
    tile = tile.reshape(*tile.shape[:dim], *own.shape, *tile.shape[x.dim() + dim + 1 :])
    return from_tile(tile, output, mesh, moved)


def _pick_from_parts(
    x: SpatialTensor, dim: int, held: tuple[int, ...], index: Tensor, name: str
) -> Tensor:
    """The entries of a dim at an index, from the tiles of all parts along it; differentiable."""
    layout, dims, size = x.spatial_layout, x.spatial_dims, x.shape[dim]
    taken: Tensor | None = None
    for plan, part in _turns(layout, held, x.mesh.part):
        tile = move_pixels(x, plan, name)
        places = on(_places(layout, dims, size, dim, part), x.device).index_select(0, index)
        is_here = (places >= 0).view(-1, *(1,) * (-dim - 1))
        if tile.shape[dim] > 0:
            here = tile.index_select(dim, places.clamp_min(0))
        else:  # all ranks need the same graph
            here = tile.sum(dim, keepdim=True).to(tile.dtype)
        taken = torch.where(is_here, here, torch.zeros_like(here) if taken is None else taken)
    assert taken is not None
    return taken


@lru_cache(maxsize=4096)
def _turns(layout: Layout, held: tuple[int, ...], part: int) -> tuple[tuple[Plan, int], ...]:
    """The plans by which tiles circulate along some dims, and the part that `part` receives."""
    turns = []
    for steps in product(*(range(layout.grid[number]) for number in held)):
        by_dim = dict(zip(held, steps, strict=True))
        others = [_further(layout, rank, by_dim) for rank in range(len(layout.boxes))]
        needed = tuple(layout.boxes[other] for other in others)
        turns.append((plan_for(layout.boxes, needed, part), others[part]))
    return tuple(turns)


def _further(layout: Layout, part: int, steps: dict[int, int]) -> int:
    """The part `steps` further along some dims, cyclically."""
    index = 0
    for number, (place, parts) in enumerate(zip(layout.part_at(part), layout.grid, strict=True)):
        index = index * parts + (place + steps.get(number, 0)) % parts
    return index


@lru_cache(maxsize=4096)
def _places(layout: Layout, dims: SpatialDims, size: int, dim: int, part: int) -> Tensor:
    """The index in the tile of a part of each entry of a dim; -1 if not in the tile."""
    places = torch.full((size,), -1)
    own = positions_in(layout, dims, size, dim, part)
    places[own] = torch.arange(len(own))
    return places


def blocks(shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """The block of result dims of each index tensor; None if tensors share dims of the result.

    For tensors that PyTorch would broadcast, in order, each of size 1 in the dims of the rest:
    (H, K, 1, 1) and (W, K) index rows by (H, K), columns by (W, K).
    """
    count = max(map(len, shapes))
    aligned = [(*(1,) * (count - len(shape)), *shape) for shape in shapes]
    result, start = [], 0
    for number, shape in enumerate(aligned):
        own = [dim for dim, size in enumerate(shape) if size > 1]
        is_last = number == len(aligned) - 1
        stop = count if is_last else max(own, default=start) + 1
        if stop <= start or any(not start <= dim < stop for dim in own):
            return None
        result.append(tuple(shape[start:stop]))
        start = stop
    return result
