"""``torch.einsum`` on divided channels; attention and batched products with heads divided."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.channels.layers import Layer
from spatialdl.spatial.channels.tensor import (
    ChannelTensor,
    all_channels_for_parts,
    channel_op,
    is_divided,
    local_channels,
)
from spatialdl.spatial.matmul import parse_equation
from spatialdl.spatial.random.plain import attention as spelled_out
from spatialdl.spatial.random.plain import check_probability


@channel_op(torch.einsum)
def einsum(equation: str, *operands: Any) -> Any:
    """Einsum of each rank's part if the result has the divided dim; else of all channels."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return NotImplemented
    letters, result = parse_equation(equation, operands)
    if any(len({*names}) < len(names) for names in letters):  # diagonals
        return NotImplemented
    for x, weight in ((0, 1), (1, 0)) if len(operands) == 2 else ():
        output = _as_layer(letters, result, operands, x, weight)
        if output is not None:
            return output
    return _einsum_of_parts(letters, result, operands)


def _as_layer(
    letters: Sequence[str], result: str, operands: Sequence[Tensor], x: int, weight: int
) -> Tensor | None:
    """Run as a layer if one operand is a matrix that maps channels of the other; else None."""
    before, matrix = letters[x], letters[weight]
    if len(matrix) != 2:
        return None
    for into, out in ((0, 1), (1, 0)):
        old, new = matrix[into], matrix[out]
        if old not in before or new in before or before.replace(old, new) != result:
            continue
        if operands[x].shape[before.index(old)] != operands[weight].shape[into]:
            continue
        terms = f"{before},{matrix}->{result}"

        def local(own: Tensor, own_weight: Tensor, bias: Tensor | None, terms: str = terms) -> Any:
            return torch.einsum(terms, own, own_weight)

        at = before.index(old)
        return Layer(local, operands[x], operands[weight], None, at, out, into).run()
    return None


def _einsum_of_parts(letters: Sequence[str], result: str, operands: Sequence[Tensor]) -> Any:
    """Each rank's part of the result, if the result has the divided dim."""
    for names, one in zip(letters, operands, strict=True):
        if is_divided(one) and names[one.at] in result:
            letter, first = names[one.at], one
            break
    else:
        return NotImplemented
    size, comm = first.shape[first.at], first.comm
    own = []
    for names, one in zip(letters, operands, strict=True):
        at = names.find(letter)
        if at >= 0 and one.shape[at] == size:
            own.append(local_channels(one, at, first.partition, comm))
        else:
            own.append(all_channels_for_parts(one, comm))
    output = torch.einsum(f"{','.join(letters)}->{result}", *own)
    return ChannelTensor(output, result.index(letter), first.partition, comm)


# --- heads, a batch dim, divided over ranks


def _first(operands: Sequence[Tensor]) -> ChannelTensor | None:
    """The first operand divided along a batch dim, unless another is divided differently."""
    divided = [one for one in operands if is_divided(one)]
    places = {one.at - one.dim() for one in divided}
    return divided[0] if len(places) == 1 and max(places) < -2 else None


def _local_operand(x: Tensor, like: ChannelTensor) -> Tensor:
    """The part of an operand, which may be broadcast, of this rank's heads."""
    at = x.dim() + like.at - like.dim()
    if at >= 0 and x.shape[at] == like.shape[like.at]:
        return local_channels(x, at, like.partition, like.comm)
    own: Tensor = all_channels_for_parts(x, like.comm)
    return own


def _have_heads(first: ChannelTensor, operands: Sequence[Tensor]) -> bool:
    """Whether all operands have the divided dim with the same size."""
    from_end, size = first.at - first.dim(), first.shape[first.at]
    return all(one.dim() >= -from_end and one.shape[from_end] == size for one in operands)


@channel_op(F.scaled_dot_product_attention)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    check_probability(dropout_p)
    features = query, key, value
    first = _first(features)
    if first is None or not _have_heads(first, features):
        return NotImplemented
    if attn_mask is not None and is_divided(attn_mask) and _first([attn_mask]) is None:
        return NotImplemented
    if dropout_p > 0:  # dropout is drawn by the position in all heads
        drop = partial(F.dropout, p=dropout_p)
        return spelled_out(query, key, value, attn_mask, is_causal, scale, False, drop)
    q, k, v = (_local_operand(one, first) for one in features)
    mask = None if attn_mask is None else _local_operand(attn_mask, first)
    attend: Any = F.scaled_dot_product_attention
    result = attend(q, k, v, mask, 0.0, is_causal, scale=scale)
    return first.like(result, result.dim() + first.at - first.dim())


@channel_op(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
def matmul(input: Tensor, other: Tensor) -> Any:
    """The product of tensors divided along a batch dim."""
    first = _first([input, other])
    if first is None or min(input.dim(), other.dim()) < 2:
        return NotImplemented
    result = torch.matmul(_local_operand(input, first), _local_operand(other, first))
    return first.like(result, result.dim() + first.at - first.dim())


@channel_op(torch.baddbmm, Tensor.baddbmm)
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    first = _first([batch1, batch2])
    if first is None or (is_divided(input) and _first([input]) is None):
        return NotImplemented
    own = [_local_operand(one, first) for one in (input, batch1, batch2)]
    return first.like(torch.baddbmm(*own, beta=beta, alpha=alpha), 0)
