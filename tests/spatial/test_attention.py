"""Attention over keys in blocks, and fused: what ring attention needs of either."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spatialdl.spatial.blockwise import (
    KERNELS,
    Dropped,
    Scores,
    backward_block,
    combined,
    forward_block,
    kernel_for,
)
from spatialdl.spatial.random import keyed
from spatialdl.spatial.random.plain import attention_of_whole
from spatialdl.spatial.random.streams import next_key

B, HEADS, L, S, E = 2, 4, 37, 29, 8
PARTS = (slice(0, 11), slice(11, 11), slice(11, 12), slice(12, S))
"""Keys of four ranks, of which one has none, in an order of their own."""


def drawn(*shape: int) -> Tensor:
    return torch.rand(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def mask() -> Tensor:
    seen = torch.rand(L, S, generator=torch.Generator().manual_seed(5)) < 0.4
    seen[3] = False  # a query that sees nothing, and one that sees nothing in the first block
    seen[4] = False
    seen[4, 20] = True
    return seen


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "a mask": {"attn_mask": mask()},
    "a bias for each head": {"attn_mask": drawn(HEADS, L, S)},
    "a bias of keys": {"attn_mask": drawn(B, 1, 1, S)},
    "a bias of queries": {"attn_mask": drawn(L, 1)},
    "dropout": {"dropout_p": 0.4},
    "dropout and a bias": {"dropout_p": 0.4, "attn_mask": drawn(1, HEADS, L, S)},
    "dropout of all": {"dropout_p": 1.0},
    "shared heads": {"enable_gqa": True},
}


def in_blocks(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, bias: Tensor | None, scores: Scores
) -> tuple[Tensor | None, ...]:
    """Result and gradients, of queries, keys, values and bias."""
    found = None
    for number, part in enumerate(PARTS):
        keys, values = key[..., part, :], value[..., part, :]
        found = combined(found, forward_block(scores.of(number), query, keys, values, bias))
    assert found is not None
    grad_bias = None if bias is None else torch.zeros_like(bias)
    grads = []
    for number, part in enumerate(PARTS):
        keys, values = key[..., part, :], value[..., part, :]
        given = grad, found[0].to(query.dtype), found[1]
        block = scores.of(number)
        grads.append(backward_block(block, query, keys, values, bias, given, grad_bias))
    queries, keys, values = zip(*grads, strict=True)
    return found[0], sum(queries), torch.cat(keys, -2), torch.cat(values, -2), grad_bias


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_whole(name: str) -> None:
    options, value_size = CASES[name], 5 if "bias" in name else E
    heads = HEADS // 2 if options.get("enable_gqa") else HEADS
    query, key = drawn(B, HEADS, E, L).mT, drawn(B, heads, S, E)  # features may be far apart
    value, grad = drawn(B, heads, S, value_size), drawn(B, HEADS, L, value_size) - 0.5
    given = options.get("attn_mask")
    bias = given.clone() if isinstance(given, Tensor) else None
    inputs = [query, key, value] + ([bias] if bias is not None and bias.is_floating_point() else [])
    for one in inputs:
        one.requires_grad_()
    with keyed(1, 2):
        whole = attention_of_whole(query, key, value, **{**options, "attn_mask": bias})
    expected = [whole, *torch.autograd.grad(whole, inputs, grad)]

    with keyed(1, 2):
        p = float(options.get("dropout_p", 0))
        drop = Dropped(next_key(), p, (B, HEADS, L, S)) if p else None
    columns = tuple(torch.arange(S)[part] for part in PARTS)
    factor = float(options.get("scale", 1 / math.sqrt(E)))
    scores = Scores(factor, bool(options.get("is_causal")), drop, torch.arange(L), columns)
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(L, S).double().masked_fill(~bias, -math.inf)
    with torch.no_grad():
        found = in_blocks(query, key, value, grad, bias, scores)
    for ours, plain in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


# --- fused kernels


def test_what_no_kernel_computes() -> None:
    x = drawn(2, 3, 7, 8)
    assert kernel_for(x, x, x[..., :5]) is None, "values of another size"
    assert kernel_for(x[None], x[None], x[None]) is None, "five dims"
    cuda = KERNELS["cuda"]
    assert not cuda.takes(x, x, x), "float64"
    x = x.float()
    assert cuda.takes(x, x, x)
    assert not cuda.takes(x[..., :6], x[..., :6], x[..., :6]), "features that are not aligned"


@pytest.mark.parametrize("queries", [32, 37])
def test_the_kernel_of_cuda_is_called_as_its_shapes_say(queries: int) -> None:
    """Shapes alone: its log-sum-exp is that of 64 queries where there are 37."""
    query, key = (
        torch.empty(2, 3, queries, 8, device="meta"),
        torch.empty(2, 3, 9, 8, device="meta"),
    )
    cuda = KERNELS["cuda"]
    out, spread = cuda.forward(query, key, key, 0.3)
    assert out.shape == query.shape
    assert spread.shape == query.shape[:-1]
    grads = cuda.backward(query, key, key, (out, out, spread), 0.3)
    assert [x.shape for x in grads] == [query.shape, key.shape, key.shape]
