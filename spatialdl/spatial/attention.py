"""Attention over the tokens of a split image.

- Split queries stay, and keys and values circulate, one part after the other (`ring`).
- Attention over windows inside tiles is local.
- Replicated queries attend to the keys of each rank there, and the results are combined.
- If channels attend to channels, the products of queries and keys are sums over all tokens.
"""

from __future__ import annotations

import math
import string
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.spatial.blockwise import Scores, WeightDropout
from spatialdl.spatial.contract import SplitLetters, contract, local_operand
from spatialdl.spatial.random.plain import (
    attention,
    attention_of_whole,
    check_probability,
    explicit_attention,
)
from spatialdl.spatial.random.streams import next_key
from spatialdl.spatial.ring import Ring, folded_attention, ring_attention
from spatialdl.spatial.span import positions_of
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, from_tile, on_layout, to_tile
from spatialdl.spatial.window import empty_output


@register_op(
    F.scaled_dot_product_attention, split=("query", "key", "value", "attn_mask"), prefix=True
)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    split = [x for x in (query, key, value, attn_mask) if isinstance(x, SpatialTensor)]
    features = [x for x in (query, key, value) if isinstance(x, SpatialTensor)]
    check_probability(dropout_p)
    options = dropout_p, is_causal, scale
    if any(-1 in x.spatial_dims.at for x in features):
        if len(features) < len(split) or not all(x.spatial_dims.is_flat for x in features):
            raise refusal(
                F.scaled_dot_product_attention,
                split,
                "its last dim (features) must not be split",
            )
        return explicit_attention(
            query, key, value, attn_mask, *options, enable_gqa, mesh=split[0].mesh
        )
    if _can_circulate(query, key, value, attn_mask, enable_gqa):
        keys, values = cast(SpatialTensor, key), cast(SpatialTensor, value)
        return _attend_over_tokens(query, keys, values, attn_mask, *options)
    if not isinstance(query, SpatialTensor):
        key, value, attn_mask = (_full(x) for x in (key, value, attn_mask))
        return attention_of_whole(
            query, key, value, attn_mask, *options, enable_gqa, mesh=split[0].mesh
        )
    if dropout_p > 0 or is_causal:
        # Not supported by PyTorch's kernel: a rank saves the weights of its queries for all keys.
        drop = partial(F.dropout, p=dropout_p)
        return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)
    return _in_windows(query, key, value, attn_mask, scale, enable_gqa)


def _full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, SpatialTensor) else x


# --- over all tokens


def _can_circulate(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shares_heads: bool
) -> bool:
    """Whether the keys are split along their tokens alone, so that their parts can circulate."""
    if not isinstance(key, SpatialTensor) or not isinstance(value, SpatialTensor):
        return False
    split = [x for x in (query, key, value) if isinstance(x, SpatialTensor)]
    if key.mesh.grid_comm.size == 1 or any(x.mesh is not key.mesh for x in split):
        return False
    along_tokens = all(
        set(x.spatial_dims.at) == {-2} and set(x.spatial_dims.outer) == {1} for x in split
    )
    leading = 3 if shares_heads else 2
    are_alike = (
        query.dim() == key.dim() == value.dim()
        and key.shape[:-1] == value.shape[:-1]
        and key.spatial_dims == value.spatial_dims
        and key.shape[-1] == query.shape[-1]
        and query.shape[:-leading] == key.shape[:-leading]
    )
    if not along_tokens or not are_alike or (mask is not None and mask.dim() > query.dim()):
        return False
    return not shares_heads or query.shape[-3] % key.shape[-3] == 0


def _attend_over_tokens(
    query: Tensor,
    key: SpatialTensor,
    value: SpatialTensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    value = on_layout(value, key.spatial_layout)
    shape = (*query.shape[:-1], key.shape[-2])
    drop = WeightDropout(next_key(key.mesh), dropout_p, shape) if dropout_p > 0 else None
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    boxes = key.spatial_layout.boxes
    columns = tuple(positions_of(key, -2, part) for part in range(len(boxes)))
    tiles = to_tile(key), to_tile(value)
    if not isinstance(query, SpatialTensor):
        scores = Scores(factor, is_causal, drop, torch.arange(query.shape[-2]), columns)
        bias = _bias(_full(mask), query)
        return folded_attention(query, *tiles, bias, key.mesh, scores)
    rows = positions_of(query, -2, query.mesh.part)
    scores = Scores(factor, is_causal, drop, rows, columns)
    if mask is not None:
        batch = string.ascii_uppercase[: query.dim() - 2]
        letters = batch[len(batch) - (mask.dim() - 2) :] + "ls"
        split = SplitLetters.of(query, batch + "le")
        mask = local_operand(F.scaled_dot_product_attention, mask, letters, split)
    ring = Ring(key.mesh, tuple(map(len, columns)))
    own = ring_attention(to_tile(query), *tiles, _bias(mask, query), ring, scores)
    return from_tile(own, query.spatial_layout, query.mesh, query.spatial_dims)


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The bias of the products: minus infinity where a boolean mask is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return zeros.masked_fill(mask.logical_not(), -math.inf)


# --- in windows


def _in_windows(
    query: SpatialTensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    operands = [query, key, value] + ([mask] if mask is not None else [])
    batch = string.ascii_uppercase[: max(x.dim() for x in operands) - 2]
    ends = ("le", "se", "sv", "ls")
    letters = [
        batch[len(batch) - (x.dim() - 2) :] + end for x, end in zip(operands, ends, strict=False)
    ]

    def local(*tiles: Tensor) -> Tensor:
        query, key, value, *mask = tiles
        if query.numel() == 0:  # PyTorch would omit keys and values from the graph
            return empty_output((*query.shape[:-1], value.shape[-1]), *tiles)
        return F.scaled_dot_product_attention(
            query, key, value, mask[0] if mask else None, **options
        )

    return contract(
        F.scaled_dot_product_attention, operands, letters, batch + "lv", local, linear=False
    )
