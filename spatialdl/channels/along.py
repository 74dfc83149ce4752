"""Operations that treat all channels alike, and shapes: done on the part that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.channels.tensor import (
    ChannelTensor,
    channel_op,
    divided_op,
    is_divided,
    on_tile,
    part_of,
    whole_for_parts,
)
from spatialdl.parallel.partition import Partition, joined
from spatialdl.random.generator import Region
from spatialdl.random.plain import check_probability, dropped
from spatialdl.random.streams import next_key, whole
from spatialdl.spatial.dropout import region_of
from spatialdl.spatial.tensor import SpatialTensor


def _each_channel(function: Any, dims: int | None = None) -> None:
    """A function of maps with so many spatial dims; of any number if it is None."""

    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        if input.at != 1 or input.dim() < 3 or input.dim() != (dims or input.dim() - 2) + 2:
            return NotImplemented  # perhaps without samples
        given = function(input.part, *args, **kwargs)
        return tuple(map(input.like, given)) if isinstance(given, tuple) else input.like(given)


for _dims in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool"):
        _each_channel(getattr(F, f"{_name}{_dims}d"), _dims)
_each_channel(F.interpolate)
_each_channel(F.upsample)


@divided_op(F.pad)
def pad(input: ChannelTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    if len(pad) // 2 >= input.dim() - input.at:
        return NotImplemented
    return input.like(F.pad(input.part, pad, mode, value))


def _unchanged(function: Any) -> None:
    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, ChannelTensor) for one in args):
            return NotImplemented
        return input.like(function(input.part, *args, **kwargs))


@divided_op(Tensor.contiguous)
def contiguous(
    input: ChannelTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    if input.stand_in().is_contiguous(memory_format=memory_format):
        return input
    return input.like(input.part.clone(memory_format=memory_format))


@divided_op(Tensor.to)
def to(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(one, ChannelTensor) for one in args):
        return NotImplemented
    converted = input.like(input.part.to(*args, **kwargs))
    kept = kwargs.get("memory_format", torch.preserve_format)
    return converted if kept is torch.preserve_format else contiguous(converted, kept)


for _function in (
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.clone, torch.clone, Tensor.detach, torch.detach, Tensor.cpu, Tensor.cuda),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
):
    _unchanged(_function)


# --- reductions, and what works along a dim


def _along(function: Any) -> None:
    """A function of (input, dim, ...) along dims other than that of channels."""

    @divided_op(function)
    def handler(input: ChannelTensor, *args: Any, **kwargs: Any) -> Any:
        dims = kwargs.get("dim", args[0] if args else None)
        given = (dims,) if isinstance(dims, int) else dims
        if isinstance(dims, bool) or not isinstance(given, tuple | list):
            return NotImplemented
        places = {dim % input.dim() for dim in given}
        if not places or input.at in places:
            return NotImplemented
        found = function(input.part, *args, **kwargs)
        one = found if isinstance(found, Tensor) else found[0]
        gone = input.dim() > one.dim()
        at = input.at - sum(dim < input.at for dim in places) * gone
        if isinstance(found, Tensor):
            return input.like(found, at)
        return type(found)([input.like(one, at) for one in found])


_REDUCING = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "max", "min")
for _name in (*_REDUCING, "softmax", "log_softmax", "cumsum"):
    for _holder in (torch, Tensor):
        _along(getattr(_holder, _name))


@divided_op(torch.flip, Tensor.flip)
def flip(input: ChannelTensor, *dims: Any) -> Any:
    given = dims[0] if dims and isinstance(dims[0], Sequence) else dims
    if not given or input.at in {dim % input.dim() for dim in given}:
        return NotImplemented
    return input.like(input.part.flip(list(given)))


# --- shapes


def _moved(
    partition: Partition, at: int, shape: Sequence[int], into: Sequence[int]
) -> tuple[int, Partition] | None:
    """Where the divided dim of `shape` lies in `into`, and how that is divided.

    Returns:
        (dim, partition), or None if it is none of its dims.
    """
    dim, size, repeats = _place_of(at, shape, into)
    if size == 0:
        return None
    found: Partition | None = None
    if size % shape[at] == 0:
        found = partition.times(size // shape[at])
    elif shape[at] % size == 0 and len(partition.pieces) == 1:
        found = partition.over(shape[at] // size)
    elif len(partition.pieces) == size and len(set(partition.pieces)) == 1 and repeats == 1:
        one = Partition(partition.pieces[:1])
        inside = _moved(one, 0, [one.size], into[dim + 1 :])
        return None if inside is None else (dim + 1 + inside[0], inside[1])
    return None if found is None else (dim, Partition(found.pieces * repeats))


def _place_of(at: int, shape: Sequence[int], into: Sequence[int]) -> tuple[int, int, int]:
    """The dim of `into` in which the entries of a dim of `shape` begin.

    Returns:
        The dim; how much of it belongs to one entry of the dims before, 0 if it does not fit; how
        many of these lie in it.
    """
    before = prod(shape[:at])
    for dim, size in enumerate(into):
        passed = prod(into[:dim])
        if passed * size > before:
            repeats = before // passed
            fits = before % passed == 0 and size % repeats == 0
            return dim, size // repeats if fits else 0, repeats
    return 0, 0, 1


def _wish(input: ChannelTensor, into: Sequence[int]) -> None:
    """Tell how a dim should be divided to become heads, or several tensors' heads."""
    dim, size, repeats = _place_of(input.at, input.shape, into)
    ranks, total = input.comm.size, input.shape[input.at]
    if not size or total % size:
        return
    if size >= ranks and len(input.partition.pieces) == 1:
        input.wish(unit=total // size)
    elif repeats == 1 and len(into) > dim + 1 and into[dim + 1] >= ranks:
        input.wish(unit=total // size // into[dim + 1], pieces=size)


def _sizes(numel: int, sizes: Sequence[int]) -> list[int]:
    known = prod(size for size in sizes if size != -1)
    return [numel // known if size == -1 else int(size) for size in sizes]


@divided_op(Tensor.view, Tensor.reshape, torch.reshape)
def reshape(input: ChannelTensor, *shape: Any, **kwargs: Any) -> Any:
    """To any shape in which a rank's channels are still a dim, or the first of those in one."""
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return NotImplemented
    sizes = shape[0] if isinstance(shape[0], Sequence) else shape
    if input.numel() == 0:
        return NotImplemented
    sizes = _sizes(input.numel(), sizes)
    if prod(sizes) != input.numel():
        return NotImplemented
    found = _moved(input.partition, input.at, input.shape, sizes)
    if found is None:
        _wish(input, sizes)
        return NotImplemented
    at, partition = found
    held, stand_in = partition.size_of(input.comm.rank), input.stand_in()
    part = input.part
    if stand_in is not part:
        several = [*sizes]
        several[at] = -1
        if stand_in.reshape(several)._base is None:  # with more channels it would be a copy
            part = part.clone()
    sizes[at] = held
    return input.like(part.reshape(sizes), at, partition)


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
    order = dims[0] if isinstance(dims[0], Sequence) else dims
    order = [dim % input.dim() for dim in order]
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
    given = dims[0] if dims and isinstance(dims[0], Sequence) else dims
    places = {dim % input.dim() for dim in given} if dims else set(range(input.dim()))
    gone = [dim for dim in places if input.shape[dim] == 1]
    if not gone:
        return input
    shape = [size for dim, size in enumerate(input.shape) if dim not in gone]
    return reshape(input, shape)


@channel_op(torch.cat, torch.concat)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along channels each keeps its parts where they are; else all are divided as the first."""
    first = next((one for one in tensors if is_divided(one)), None)
    if first is None or any(one.dim() != first.dim() for one in tensors):
        return NotImplemented
    comm, at = first.comm, first.at
    if dim % first.dim() != at:
        inner = [part_of(one, at, first.partition, comm) for one in tensors]
        return first.like(torch.cat(inner, dim))
    if any(one.shape[at] < comm.size for one in tensors):
        return NotImplemented
    parts = [
        one.partition
        if is_divided(one) and one.at == at
        else Partition.even(one.shape[at], comm.size)
        for one in tensors
    ]
    inner = [part_of(one, at, part, comm) for one, part in zip(tensors, parts, strict=True)]
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
            tensor.wish(pieces=len(sizes))
        return NotImplemented
    known = [part for part in parts if part is not None]
    inner = torch.split(tensor.part, [part.size_of(tensor.comm.rank) for part in known], place)
    each = zip(inner, known, strict=True)
    return tuple(tensor.like(one, place, part) for one, part in each)


@divided_op(torch.unbind, Tensor.unbind)
def unbind(input: ChannelTensor, dim: int = 0) -> Any:
    place = dim % input.dim()
    if place == input.at:
        input.wish_apart()
        return NotImplemented
    at = input.at - (place < input.at)
    return tuple(input.like(one, at) for one in input.part.unbind(place))


@divided_op(Tensor.__getitem__)
def getitem(input: ChannelTensor, index: Any) -> Any:
    """Numbers and slices of other dims."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(one is None or one is ... or isinstance(one, int | slice) for one in given):
        return NotImplemented
    if any(isinstance(one, bool) for one in given):
        return NotImplemented
    taken = sum(one is not None and one is not ... for one in given)
    rest = [slice(None)] * (input.dim() - taken)
    where = next((n for n, one in enumerate(given) if one is ...), None)
    full = given + rest if where is None else given[:where] + rest + given[where + 1 :]
    dim = at = 0
    for one in full:
        if one is None:
            at += 1
            continue
        if dim == input.at:
            break
        dim, at = dim + 1, at + (not isinstance(one, int))
    if isinstance(one, int):
        input.wish_apart()
    if one != slice(None):
        return NotImplemented
    return input.like(input.part[tuple(full)], at)


# --- products over heads


@channel_op(F.scaled_dot_product_attention)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Of the heads that a rank has; they are a dim of the batch."""
    if not (is_divided(query) and is_divided(key) and is_divided(value)) or dropout_p:
        return NotImplemented
    at, comm, partition = query.at, query.comm, query.partition
    if at != query.dim() - 3 or query.shape[at] != key.shape[at]:
        return NotImplemented
    inner = [part_of(one, at, partition, comm) for one in (query, key, value)]
    if attn_mask is not None:
        of_heads = attn_mask.dim() > 2 and attn_mask.shape[-3] == query.shape[at]
        attn_mask = (
            part_of(attn_mask, attn_mask.dim() - 3, partition, comm)
            if of_heads
            else whole_for_parts(attn_mask, comm)
        )
    attend: Any = F.scaled_dot_product_attention
    return query.like(attend(*inner, attn_mask, dropout_p, *args, **kwargs))


@channel_op(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
def matmul(input: Tensor, other: Tensor) -> Any:
    """Of tensors divided along a dim of the batch."""
    x: Any = input if is_divided(input) else other
    if not is_divided(x) or input.dim() != other.dim() or x.at >= x.dim() - 2:
        return NotImplemented
    if input.shape[x.at] != other.shape[x.at]:
        return NotImplemented
    inner = [part_of(one, x.at, x.partition, x.comm) for one in (input, other)]
    return x.like(torch.matmul(*inner))


# --- random numbers


def _region(x: ChannelTensor) -> Region:
    """Where a rank's channels lie in the whole tensor."""
    inner = x.part
    region = region_of(inner) if isinstance(inner, SpatialTensor) else whole(inner.shape)
    positions = list(region.positions)
    held = x.partition.held(x.comm.rank)
    positions[x.at] = torch.cat([torch.arange(start, stop) for start, stop in held])
    return Region(tuple(positions), tuple(x.shape))


def _dropout(name: str, channels: bool, alpha: bool) -> None:
    @divided_op(getattr(torch, name))
    def dropout(input: ChannelTensor, p: float, train: bool) -> Any:
        check_probability(p)
        if not train or p == 0:
            return input
        region, key = _region(input), next_key()
        return input.like(
            on_tile(lambda tile: dropped(tile, region, key, p, channels, alpha), input.part)
        )

    @divided_op(getattr(torch, name + "_"))
    def dropout_(input: ChannelTensor, p: float, train: bool) -> Any:
        given = dropout(input, p, train)
        if given is not input:
            input.part.copy_(given.part)
        return input


_dropout("dropout", channels=False, alpha=False)
_dropout("feature_dropout", channels=True, alpha=False)
_dropout("alpha_dropout", channels=False, alpha=True)
_dropout("feature_alpha_dropout", channels=True, alpha=True)
