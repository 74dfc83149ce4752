"""Attention over the tokens of a split image.

Each rank keeps its own queries; keys and values are gathered for them (networks for large images
make these few first), or stay where they are if attention goes over windows that lie inside tiles.
"""

from __future__ import annotations

import string
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from spatialdl.random.plain import attention, attention_of_whole
from spatialdl.spatial.contract import contract
from spatialdl.spatial.table import refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.spatial.window import nothing


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
    if any(-1 in x.spatial_dims.at for x in features):
        raise refusal(
            F.scaled_dot_product_attention, split, "its last dim, of features, must not be split"
        )
    if not isinstance(query, SpatialTensor):
        # a few queries of the whole image, the same on every rank: they look at everything
        key, value, attn_mask = (_whole(x) for x in (key, value, attn_mask))
        return attention_of_whole(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            mesh=split[0].mesh,
        )
    if dropout_p > 0 or is_causal:
        # more than PyTorch's kernel can: a rank keeps the weights of its own queries for all keys
        drop = partial(F.dropout, p=dropout_p)
        return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    operands = [query, key, value] + ([attn_mask] if attn_mask is not None else [])
    batch = string.ascii_uppercase[: max(x.dim() for x in operands) - 2]
    ends = ("le", "se", "sv", "ls")
    letters = [
        batch[len(batch) - (x.dim() - 2) :] + end for x, end in zip(operands, ends, strict=False)
    ]

    def local(*tiles: Tensor) -> Tensor:
        query, key, value, *mask = tiles
        if query.numel() == 0:  # PyTorch's leaves keys and values out of the graph then
            return nothing((*query.shape[:-1], value.shape[-1]), *tiles)
        return F.scaled_dot_product_attention(
            query, key, value, mask[0] if mask else None, **options
        )

    return contract(
        F.scaled_dot_product_attention, operands, letters, batch + "lv", local, linear=False
    )


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, SpatialTensor) else x
