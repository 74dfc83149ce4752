"""Slicing functions: narrow, select, split, chunk and related ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from spatialdl.spatial.picking import picked
from spatialdl.spatial.span import on_meta
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile


def _at(x: Tensor, dim: int, item: slice | int) -> Tensor:
    part: Tensor = x[(slice(None),) * (dim % x.dim()) + (item,)]
    return part


@register_op(torch.narrow, Tensor.narrow, split=("input",), prefix=True)
def narrow(input: SpatialTensor, dim: int, start: Any, length: int) -> Tensor:
    on_meta(torch.narrow, input, dim, int(start), length)
    first = int(start) % input.shape[dim] if start < 0 else int(start)
    return _at(input, dim, slice(first, first + length))


@register_op(torch.select, Tensor.select, split=("input",), prefix=True)
def select(input: SpatialTensor, dim: int, index: int) -> Tensor:
    return _at(input, dim, int(index))


@register_op(torch.unbind, Tensor.unbind, split=("input",), prefix=True)
def unbind(input: SpatialTensor, dim: int = 0) -> tuple[Tensor, ...]:
    on_meta(torch.unbind, input, dim)
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
    whole = on_meta(torch.split, tensor, split_size_or_sections, dim)
    return tuple(_pieces(tensor, whole, dim))


@register_op(torch.split_with_sizes, Tensor.split_with_sizes, split=("input",), prefix=True)
def split_with_sizes(input: SpatialTensor, split_sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return split(input, list(split_sizes), dim)


@register_op(torch.chunk, Tensor.chunk, split=("input",), prefix=True)
def chunk(input: SpatialTensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_pieces(input, on_meta(torch.chunk, input, chunks, dim), dim))


@register_op(torch.tensor_split, Tensor.tensor_split, split=("input",), prefix=True)
def tensor_split(
    input: SpatialTensor, indices_or_sections: Any, dim: int = 0
) -> tuple[Tensor, ...]:
    """Slices as in PyTorch, also for overlapping sections."""
    size = input.shape[dim]
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    if isinstance(indices_or_sections, int):
        whole = on_meta(torch.tensor_split, input, indices_or_sections, dim)
        return tuple(_pieces(input, whole, dim))
    edges = [0, *indices_or_sections, size]
    return tuple(_at(input, dim, slice(start, stop)) for start, stop in pairwise(edges))


@register_op(torch.hsplit, Tensor.hsplit, split=("input",), prefix=True)
def hsplit(input: SpatialTensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    on_meta(torch.hsplit, input, indices_or_sections)
    return tensor_split(input, indices_or_sections, 1)


@register_op(torch.vsplit, Tensor.vsplit, split=("input",), prefix=True)
def vsplit(input: SpatialTensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    on_meta(torch.vsplit, input, indices_or_sections)
    return tensor_split(input, indices_or_sections, 0)


@register_op(torch.dsplit, Tensor.dsplit, split=("input",), prefix=True)
def dsplit(input: SpatialTensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    on_meta(torch.dsplit, input, indices_or_sections)
    return tensor_split(input, indices_or_sections, 2)


@register_op(torch.index_select, Tensor.index_select, split=("input",), prefix=True)
def index_select(input: SpatialTensor, dim: int, index: Tensor) -> Tensor:
    on_meta(torch.index_select, input, dim, index)
    if input.spatial_dims.holds(dim, input.dim()):
        return picked(torch.index_select, input, dim % input.dim() - input.dim(), index.view(-1))
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
