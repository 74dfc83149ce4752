"""Views, slices and concatenations of divided tensors, applied to each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from spatialdl.layout.partition import Partition, joined
from spatialdl.spatial.channels.tensor import (
    ChannelTensor,
    all_channels_for_parts,
    channel_op,
    divided_op,
    is_divided,
    local_channels,
)
from spatialdl.spatial.dims import SpatialDims, View, regroup
from spatialdl.spatial.random.composite import numbers_of
from spatialdl.spatial.tensor import SpatialTensor


def _view(shape: Sequence[int], at: int, into: Sequence[int]) -> View | None:
    """The regrouping of a tensor divided along dim `at`; None if it cuts or mixes this dim."""
    return regroup(shape, into, SpatialDims.of(at - len(shape)), (shape[at],))


def _place_in(
    partition: Partition, view: View, into: Sequence[int], inner: Sequence[int]
) -> tuple[int, Partition] | None:
    """The dim of `into` that contains the divided dim after a view, and its partition.

    Args:
        inner: the sizes of the dims after the divided one before the view.

    Returns:
        (dim, partition), or None if ranks would have parts of one entry.
    """
    (at,), (repeats,), (step,), (factor,) = view.dims.at, view.dims.outer, view.steps, view.factors
    dim = at + len(into)
    new: Partition | None = None
    if step == 1:
        new = partition.times(factor)
    elif factor == 1 and len(partition.pieces) == 1:
        new = partition.over(step)
    elif len(partition.pieces) == into[dim] and len(set(partition.pieces)) == 1 and repeats == 1:
        one, rest = Partition(partition.pieces[:1]), into[dim + 1 :]
        within = _view((one.size, *inner), 0, rest)
        found = None if within is None else _place_in(one, within, rest, inner)
        return None if found is None else (dim + 1 + found[0], found[1])
    return None if new is None else (dim, Partition(new.pieces * repeats))


def _request_heads(input: ChannelTensor, view: View, into: Sequence[int]) -> None:
    """Request a partition that can be viewed as heads, or as heads of several tensors."""
    (at,), (repeats,), (step,), (factor,) = view.dims.at, view.dims.outer, view.steps, view.factors
    inner, ranks, size = into[at:][1:], input.comm.size, input.shape[input.at] // step
    if factor > 1:
        return
    if size >= ranks and len(input.partition.pieces) == 1:
        input.request(unit=step)
    elif repeats == 1 and inner and inner[0] >= ranks:
        input.request(unit=step // inner[0], pieces=size)


def _sizes(numel: int, sizes: Sequence[int]) -> list[int]:
    known = prod(size for size in sizes if size != -1)
    return [numel // known if size == -1 else int(size) for size in sizes]


@divided_op(Tensor.view, Tensor.reshape, torch.reshape)
def reshape(input: ChannelTensor, *shape: Any, **kwargs: Any) -> Any:
    """Reshape to a shape in which a rank's channels are a dim, or the first factor of one."""
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return NotImplemented
    if input.numel() == 0:
        return NotImplemented
    sizes = _sizes(input.numel(), numbers_of(shape))
    view = _view(input.shape, input.at, sizes)
    if view is None:
        return NotImplemented
    moved = _place_in(input.partition, view, sizes, input.shape[input.at + 1 :])
    if moved is None:
        _request_heads(input, view, sizes)
        return NotImplemented
    at, partition = moved
    held, stand_in = partition.size_of(input.comm.rank), input.stand_in()
    part = input.part
    if stand_in is not part:
        several = [*sizes]
        several[at] = -1
        if stand_in.reshape(several)._base is None:  # with more channels it is a copy
            part = part.clone()
    sizes[at] = held
    return input.like(part.reshape(sizes), at, partition)


@channel_op(Tensor.reshape_as, Tensor.view_as)
def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    return input.reshape(other.shape)


@divided_op(torch.unflatten, Tensor.unflatten)
def unflatten(input: ChannelTensor, dim: int, sizes: Sequence[int]) -> Any:
    place = dim % input.dim()
    inside = _sizes(input.shape[place], sizes)
    return reshape(input, (*input.shape[:place], *inside, *input.shape[place + 1 :]))


@divided_op(torch.flatten, Tensor.flatten)
def flatten(input: ChannelTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % input.dim(), end_dim % input.dim()
    shape = (*input.shape[:first], prod(input.shape[first : last + 1]), *input.shape[last + 1 :])
    return reshape(input, shape)


@divided_op(Tensor.permute, torch.permute)
def permute(input: ChannelTensor, *dims: Any) -> Any:
    if not dims:
        return NotImplemented
    order = [dim % input.dim() for dim in numbers_of(dims)]
    return input.like(input.part.permute(order), order.index(input.at))


@divided_op(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
def transpose(input: ChannelTensor, dim0: int, dim1: int) -> Any:
    one, two = dim0 % input.dim(), dim1 % input.dim()
    at = {one: two, two: one}.get(input.at, input.at)
    return input.like(input.part.transpose(one, two), at)


@divided_op(Tensor.unsqueeze, torch.unsqueeze)
def unsqueeze(input: ChannelTensor, dim: int) -> Any:
    place = dim % (input.dim() + 1)
    return input.like(input.part.unsqueeze(place), input.at + (place <= input.at))


@divided_op(Tensor.squeeze, torch.squeeze)
def squeeze(input: ChannelTensor, *dims: Any, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    places = {dim % input.dim() for dim in numbers_of(dims)} if dims else set(range(input.dim()))
    gone = [dim for dim in places if input.shape[dim] == 1]
    if not gone:
        return input
    shape = [size for dim, size in enumerate(input.shape) if dim not in gone]
    return reshape(input, shape)


@channel_op(torch.cat, torch.concat)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenate: along channels each keeps its partition, else all are divided as the first."""
    first = next((one for one in tensors if is_divided(one)), None)
    if first is None or any(one.dim() != first.dim() for one in tensors):
        return NotImplemented
    comm, at = first.comm, first.at
    if dim % first.dim() != at:
        inner = [local_channels(one, at, first.partition, comm) for one in tensors]
        return first.like(torch.cat(inner, dim))
    if any(one.shape[at] < comm.size for one in tensors):
        return NotImplemented
    parts = [
        one.partition
        if is_divided(one) and one.at == at
        else Partition.even(one.shape[at], comm.size)
        for one in tensors
    ]
    inner = [local_channels(one, at, part, comm) for one, part in zip(tensors, parts, strict=True)]
    return ChannelTensor(torch.cat(inner, at), at, joined(parts), comm)


@divided_op(torch.chunk, Tensor.chunk)
def chunk(input: ChannelTensor, chunks: int, dim: int = 0) -> Any:
    return split(input, -(-input.shape[dim] // chunks), dim)


@divided_op(torch.split, Tensor.split)
def split(tensor: ChannelTensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    place, size = dim % tensor.dim(), tensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        sizes = [
            min(split_size_or_sections, size - start)
            for start in range(0, size, split_size_or_sections)
        ]
    else:
        sizes = list(split_size_or_sections)
    if place != tensor.at:
        return tuple(map(tensor.like, torch.split(tensor.part, sizes, place)))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [tensor.partition.part(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    if any(part is None for part in parts):
        if len(set(sizes)) == 1 and sizes[0] >= tensor.comm.size:
            tensor.request(pieces=len(sizes))
        return NotImplemented
    known = [part for part in parts if part is not None]
    inner = torch.split(tensor.part, [part.size_of(tensor.comm.rank) for part in known], place)
    each = zip(inner, known, strict=True)
    return tuple(tensor.like(one, place, part) for one, part in each)


@divided_op(torch.unbind, Tensor.unbind)
def unbind(input: ChannelTensor, dim: int = 0) -> Any:
    place = dim % input.dim()
    if place == input.at:
        input.request_apart()
        return NotImplemented
    at = input.at - (place < input.at)
    return tuple(input.like(one, at) for one in input.part.unbind(place))


@divided_op(Tensor.expand)
def expand(input: ChannelTensor, *sizes: Any, **kwargs: Any) -> Any:
    if kwargs or not sizes:
        return NotImplemented
    into = list(numbers_of(sizes))
    at = input.at + len(into) - input.dim()
    if at < input.at or into[at] not in (-1, input.shape[input.at]):
        return NotImplemented
    into[at] = -1
    return input.like(input.part.expand(into), at)


@channel_op(Tensor.expand_as)
def expand_as(input: Tensor, other: Tensor) -> Any:
    if is_divided(input):
        return expand(input, other.shape)
    if not is_divided(other) or isinstance(input, ChannelTensor):
        return NotImplemented
    at = input.dim() + other.at - other.dim()
    if at >= 0 and input.shape[at] > 1:
        return input.expand(other.shape)
    return other.like(all_channels_for_parts(input, other.comm).expand(other.part.shape))


@divided_op(Tensor.repeat)
def repeat(input: ChannelTensor, *repeats: Any, **kwargs: Any) -> Any:
    if kwargs or not repeats:
        return NotImplemented
    times = numbers_of(repeats)
    at = input.at + len(times) - input.dim()
    if at < input.at or times[at] != 1:
        return NotImplemented
    return input.like(input.part.repeat(*times), at)


@divided_op(Tensor.__getitem__)
def getitem(input: ChannelTensor, index: Any) -> Any:
    """Index dims other than channels by integers and slices, and one of them by a tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(_is_index(one) for one in items):
        return NotImplemented
    places = [one for one in items if isinstance(one, Tensor)]
    if len(places) > 1 or (places and any(isinstance(one, int) for one in items)):
        return NotImplemented  # indexed dims may move to the front
    taken = sum(one is not None and one is not ... for one in items)
    rest = [slice(None)] * (input.dim() - taken)
    where = next((n for n, one in enumerate(items) if one is ...), None)
    full = items + rest if where is None else items[:where] + rest + items[where + 1 :]
    dim = at = 0
    for one in full:
        if one is None:
            at += 1
            continue
        if dim == input.at:
            break
        dim, at = dim + 1, at + (one.dim() if isinstance(one, Tensor) else isinstance(one, slice))
    if isinstance(one, int):
        input.request_apart()
    if isinstance(one, Tensor) or one != slice(None):
        return NotImplemented
    return input.like(input.part[tuple(full)], at)


def _is_index(x: Any) -> bool:
    if isinstance(x, Tensor):
        integers = (torch.int64, torch.int32)
        return x.dtype in integers and not isinstance(x, ChannelTensor | SpatialTensor)
    return x is None or x is ... or (isinstance(x, int | slice) and not isinstance(x, bool))
