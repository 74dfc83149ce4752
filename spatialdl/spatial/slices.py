"""Slicing functions: narrow, select, split, chunk and related ones; cat and stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.plan import plan_for
from spatialdl.layout.layout import Box, Layout, last_slices
from spatialdl.spatial.dims import image_dims
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.operands import own_box_of
from spatialdl.spatial.picking import pick
from spatialdl.spatial.reindex import fetch, separate_dims_of
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, on_layout, to_tile


def _at(x: Tensor, dim: int, item: slice | int) -> Tensor:
    part: Tensor = x[(slice(None),) * (dim % x.dim()) + (item,)]
    return part


@register_op(torch.narrow, Tensor.narrow, split=("input",), prefix=True)
def narrow(input: SpatialTensor, dim: int, start: Any, length: int) -> Tensor:
    first = int(start) % input.shape[dim] if start < 0 else int(start)
    return _at(input, dim, slice(first, first + length))


@register_op(torch.select, Tensor.select, split=("input",), prefix=True)
def select(input: SpatialTensor, dim: int, index: int) -> Tensor:
    return _at(input, dim, int(index))


@register_op(torch.unbind, Tensor.unbind, split=("input",), prefix=True)
def unbind(input: SpatialTensor, dim: int = 0) -> tuple[Tensor, ...]:
    if input.spatial_dims.holds(dim, input.dim()):
        raise refusal(torch.unbind, [input], "a split dim cannot be unbound; slice it")
    return tuple(_at(input, dim, place) for place in range(input.shape[dim]))


def _pieces(x: SpatialTensor, whole: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    """Consecutive parts of `x` along `dim` with the sizes of the tensors `whole`."""
    start = 0
    for part in whole:
        stop = start + part.shape[dim]
        yield _at(x, dim, slice(start, stop))
        start = stop


@register_op(torch.split, Tensor.split, split=("tensor",), prefix=True)
def split(tensor: SpatialTensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    whole = meta_result(torch.split, tensor, split_size_or_sections, dim)
    return tuple(_pieces(tensor, whole, dim))


@register_op(torch.split_with_sizes, Tensor.split_with_sizes, split=("input",), prefix=True)
def split_with_sizes(input: SpatialTensor, split_sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return split(input, list(split_sizes), dim)


@register_op(torch.chunk, Tensor.chunk, split=("input",), prefix=True)
def chunk(input: SpatialTensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_pieces(input, meta_result(torch.chunk, input, chunks, dim), dim))


@register_op(torch.tensor_split, Tensor.tensor_split, split=("input",), prefix=True)
def tensor_split(
    input: SpatialTensor, indices_or_sections: Any, dim: int = 0
) -> tuple[Tensor, ...]:
    """Slices as in PyTorch, also for overlapping sections."""
    size = input.shape[dim]
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    if isinstance(indices_or_sections, int):
        whole = meta_result(torch.tensor_split, input, indices_or_sections, dim)
        return tuple(_pieces(input, whole, dim))
    edges = [0, *indices_or_sections, size]
    return tuple(_at(input, dim, slice(start, stop)) for start, stop in pairwise(edges))


def _register_split(name: str, dim: int) -> None:
    @register_op(getattr(torch, name), getattr(Tensor, name), split=("input",), prefix=True)
    def split_along(input: SpatialTensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
        return tensor_split(input, indices_or_sections, dim)


for _dim, _name in enumerate(("vsplit", "hsplit", "dsplit")):
    _register_split(_name, _dim)


@register_op(torch.index_select, Tensor.index_select, split=("input",), prefix=True)
def index_select(input: SpatialTensor, dim: int, index: Tensor) -> Tensor:
    if input.spatial_dims.holds(dim, input.dim()):
        return pick(torch.index_select, input, dim % input.dim() - input.dim(), index.view(-1))
    tile = to_tile(input).index_select(dim, index)
    return from_tile(tile, input.spatial_layout, input.mesh, input.spatial_dims)


@register_op(torch.diff, Tensor.diff, split=("input",), prefix=True)
def diff(input: SpatialTensor, n: int = 1, dim: int = -1) -> Tensor:
    result: Tensor = input
    for _ in range(n):
        size = result.shape[dim]
        after, before = _at(result, dim, slice(1, size)), _at(result, dim, slice(0, size - 1))
        result = after.ne(before) if input.dtype == torch.bool else after - before
    return result


# --- concatenation


CAT_NAMES = (torch.cat, torch.concat, torch.concatenate)


@register_op(*CAT_NAMES, split=("tensors",), prefix=True)
def cat(tensors: Sequence[Tensor], dim: int = 0, axis: int | None = None) -> Tensor:
    dim = dim if axis is None else axis
    whole = meta_result(torch.cat, tensors, dim)
    operands = [x for x in tensors if x.dim() != 1 or x.numel()]  # PyTorch ignores empty vectors
    first = next(x for x in operands if isinstance(x, SpatialTensor))
    dim = dim % first.dim() - first.dim()
    if first.spatial_dims.holds(dim, first.dim()):
        joined = _along_split_dim(operands, first, dim)
    else:
        tiles = [_tile_beside(x, first) for x in operands]
        layout, mesh, dims = first.spatial_layout, first.mesh, first.spatial_dims
        joined = from_tile(torch.cat(tiles, dim), layout, mesh, dims)
    return joined if joined.dtype == whole.dtype else joined.to(whole.dtype)


def _tile_beside(x: Tensor, first: SpatialTensor) -> Tensor:
    """This rank's tile of an operand, split or whole, on the layout of `first`."""
    _check_dims(x, first)
    if isinstance(x, SpatialTensor):
        return to_tile(on_layout(x, first.spatial_layout))
    return to_tile(own_box_of(torch.cat, x, first, x.shape))


def _check_dims(x: Tensor, first: SpatialTensor) -> None:
    if isinstance(x, SpatialTensor) and x.spatial_dims != first.spatial_dims:
        raise refusal(
            torch.cat,
            [first],
            f"another operand is split{x.spatial_dims.describe() or ', spatial dims last'}; "
            "permute it so that the spatial dims are at the same dims",
        )


def _along_split_dim(operands: Sequence[Tensor], first: SpatialTensor, dim: int) -> SpatialTensor:
    """Concatenate images along a spatial dim: each rank fetches its box of every operand."""
    if list(first.spatial_dims.at).count(dim) > 1:
        return _beside_pixels(operands, first, dim)
    dims = separate_dims_of(torch.cat, first)
    along, last = dims.index(dim), image_dims(len(dims)).at
    sizes = [x.shape[dim] for x in operands]
    output = first.spatial_layout.of_samples(1).resized(along, sum(sizes))
    starts = accumulate(sizes, initial=0)
    pieces = [
        _local_piece(x, first, output, start, along)
        for x, start in zip(operands, starts, strict=False)
    ]
    image = torch.cat(pieces, last[along])
    return from_tile(image.movedim(last, dims), output, first.mesh, first.spatial_dims)


def _beside_pixels(operands: Sequence[Tensor], first: SpatialTensor, dim: int) -> SpatialTensor:
    """Add whole tensors (class tokens, registers) before and after the tokens of an image."""
    dims = first.spatial_dims
    if sum(isinstance(x, SpatialTensor) for x in operands) > 1 or set(dims.outer) != {1}:
        raise refusal(
            torch.cat,
            [first],
            "tokens of an image can be concatenated with whole tensors only: call full_tensor() on "
            "all operands but one",
        )
    place = next(number for number, x in enumerate(operands) if x is first)
    sizes = [x.shape[dim] for x in operands]
    joined = dims._replace(
        prefix=dims.prefix + sum(sizes[:place]), suffix=dims.suffix + sum(sizes[place + 1 :])
    )
    has_tokens = first.mesh.part == 0  # other ranks keep them in their graph
    tiles = [
        to_tile(first) if x is first else x if has_tokens else x.narrow(dim, 0, 0) for x in operands
    ]
    return from_tile(torch.cat(tiles, dim), first.spatial_layout, first.mesh, joined)


def _local_piece(x: Tensor, first: SpatialTensor, output: Layout, start: int, along: int) -> Tensor:
    """The part of `x`, which begins at `start` of the output, in this rank's output box."""
    _check_dims(x, first)
    dims, mesh = first.spatial_dims.at, first.mesh
    last = image_dims(len(dims)).at
    size = x.shape[dims[along]]
    needed = tuple(_shift_box(box, start, size, along) for box in output.boxes)
    if isinstance(x, SpatialTensor):
        plan = plan_for(x.spatial_layout.of_samples(1).boxes, needed, mesh.part)
        return fetch(to_tile(x).movedim(dims, last), plan, mesh, name="cat")
    own = (slice(*interval) for interval in needed[mesh.part].spatial)
    return x.movedim(dims, last)[last_slices(own)]


def _shift_box(box: Box, start: int, size: int, along: int) -> Box:
    low, high = (min(max(edge - start, 0), size) for edge in box.spatial[along])
    return box.but(1 + along, (low, high))


@register_op(torch.stack, split=("tensors",), prefix=True)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return cat([x.unsqueeze(dim) for x in tensors], dim)


@register_op(torch.hstack, split=("tensors",), prefix=True)
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat(tensors, 1)


@register_op(torch.vstack, torch.row_stack, split=("tensors",), prefix=True)
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat([x if x.dim() > 1 else x.unsqueeze(0) for x in tensors], 0)


@register_op(torch.dstack, split=("tensors",), prefix=True)
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat([x if x.dim() > 2 else x.unsqueeze(-1) for x in tensors], 2)
