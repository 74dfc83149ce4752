"""Attention over the tokens of a split image: everywhere, in windows, along one axis."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, shard
from spatialdl.random import keyed
from tests.mpi.equality import check, check_in, parameter

N, C, H, W = 2, 8, 12, 4
HEADS = 2
Meshes = dict[tuple[int, int], Mesh]


def heads(x: Tensor) -> Tensor:
    """(N, L, C) to (N, heads, L, features)."""
    return x.reshape(x.shape[0], -1, HEADS, C // HEADS).transpose(1, 2)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), mask, scale=0.7)
    return y.transpose(1, 2).reshape(q.shape[0], -1, C)


def fewer(x: Tensor) -> Tensor:
    """Keys of a reduced image, as in SegFormer and PVT."""
    return tokens(F.avg_pool2d(x, 2))


def with_itself(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.scaled_dot_product_attention(t, t, t)


def in_windows(x: Tensor, size: int, mask: Tensor | None = None) -> Tensor:
    x = x.permute(0, 2, 3, 1).view(N, H // size, size, W // size, size, C)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, C)
    return attend(x, x.sin(), x.cos(), mask)


WHERE: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "everywhere": (lambda x: attend(tokens(x), tokens(x).sin(), tokens(x)), []),
    "the same tensor thrice": (
        lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x)),
        [],
    ),
    "with itself": (with_itself, []),
    "with a bias of positions": (
        lambda x, b: attend(tokens(x), tokens(x), tokens(x), b),
        [parameter(random.Random(1), 1, HEADS, H * W, H * W)],
    ),
    "fewer keys": (lambda x: attend(tokens(x), fewer(x), fewer(x)), []),
    "whole keys": (
        lambda x, k: attend(tokens(x), k, k),
        [parameter(random.Random(2), N, 5, C)],
    ),
    "a few whole queries": (
        lambda x, q: attend(q, tokens(x), tokens(x)),
        [parameter(random.Random(3), N, 5, C)],
    ),
    "in windows": (lambda x: in_windows(x, 2), []),
    "in windows larger than some tiles": (lambda x: in_windows(x, 4), []),
    "in windows with a mask each": (
        lambda x, b: in_windows(x, 4, b),
        [parameter(random.Random(4), N * 3, 1, 16, 16)],
    ),
    "along rows": (
        lambda x: F.scaled_dot_product_attention(
            *(x.permute(0, 3, 2, 1).reshape(N * W, H, C),) * 3
        ),
        [],
    ),
    "along columns": (
        lambda x: F.scaled_dot_product_attention(
            *(x.permute(0, 2, 3, 1).reshape(N * H, W, C),) * 3
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", WHERE)
def test_attention(name: str, meshes: Meshes) -> None:
    operation, parameters = WHERE[name]
    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, parameters, mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_pytorch_s_own_module(batch_first: bool, need_weights: bool, meshes: Meshes) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(C, HEADS, batch_first=batch_first).double()
    names = [name for name, _ in module.named_parameters()]
    values = [value.detach() for value in module.parameters()]

    def operation(x: Tensor, *values: Tensor) -> Tensor:
        t = tokens(x) if batch_first else tokens(x).transpose(0, 1)
        given = dict(zip(names, values, strict=True))
        options = {"need_weights": need_weights}
        y, weights = torch.func.functional_call(module, given, (t, t, t), options)
        return y + 0 * weights.sum() if need_weights else y

    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, values, mesh, f"on {mesh.grid} ")


def test_an_encoder_layer(meshes: Meshes) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, HEADS, 16, dropout=0.0, batch_first=True).double()
    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(lambda x: layer(tokens(x)), image, [], mesh, f"on {mesh.grid} ")


def half_seen() -> Tensor:
    """A mask of which the first row sees nothing."""
    mask = torch.rand(H * W, H * W, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[0] = False
    return mask


BY_HAND: dict[str, tuple[dict[str, object], int]] = {
    "causal": ({"is_causal": True}, C),
    "dropout": ({"dropout_p": 0.5}, C),
    "dropout of all": ({"dropout_p": 1.0}, C),
    "dropout and a mask": ({"dropout_p": 0.3, "attn_mask": half_seen()}, C),
    "dropout and a bias": ({"dropout_p": 0.3, "attn_mask": half_seen() * 2.0, "scale": 0.3}, C),
    "dropout, causal, shared heads": (
        {"dropout_p": 0.3, "is_causal": True, "enable_gqa": True},
        C // 2,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_attention_whose_weights_are_kept(name: str, meshes: Meshes) -> None:
    """Dropout draws the same weights in every layout, within `keyed`."""
    options, channels = BY_HAND[name]

    def operation(x: Tensor) -> Tensor:
        q, k = heads(tokens(x)), heads(tokens(x))[:, : channels * HEADS // C]
        with keyed(1, 2):
            return F.scaled_dot_product_attention(q, k, k.sin(), **options)

    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, [], mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("options", [{}, {"scale": 1.0}, {"dropout_p": 0.3}, {"is_causal": True}])
def test_channels_that_attend_to_channels(options: dict[str, object], meshes: Meshes) -> None:
    """The products of queries and keys are sums over all tokens."""

    def operation(x: Tensor) -> Tensor:
        q, k = (F.normalize(x.flatten(2), dim=-1) for x in (x, x.sin()))
        with keyed(1, 2):
            return F.scaled_dot_product_attention(q, k, x.cos().flatten(2), **options)

    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, [], mesh, f"{options} on {mesh.grid} ")


def test_a_few_whole_queries_with_dropout(meshes: Meshes) -> None:
    queries = parameter(random.Random(3), N, 5, C)

    def operation(x: Tensor, q: Tensor) -> Tensor:
        with keyed(1, 2):
            y = F.scaled_dot_product_attention(q, tokens(x), tokens(x).sin(), dropout_p=0.4)
        return y + 0 * x.sum()

    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, [queries], mesh, f"on {mesh.grid} ")


def test_modules_with_dropout(meshes: Meshes) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, HEADS, 16, dropout=0.2, batch_first=True).double()

    def operation(x: Tensor) -> Tensor:
        with keyed(1, 2):
            return layer(tokens(x))

    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, [], mesh, f"on {mesh.grid} ")


def test_features_must_be_whole(meshes: Meshes) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(N, C, H, W), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="must not be split"):
            F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("dims", [1, 3])
def test_over_signals_and_volumes(dims: int) -> None:
    def in_heads(x: Tensor) -> Tensor:
        return x.flatten(2).unflatten(1, (2, 2)).transpose(2, 3)

    def by_function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(in_heads(x), in_heads(2 * x), in_heads(x.exp()))

    def by_hand(x: Tensor) -> Tensor:
        q, k, v = in_heads(x), in_heads(2 * x), in_heads(x.exp())
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    for name, operation in {"function": by_function, "by hand": by_hand}.items():
        check_in(dims, operation, name)
