"""Tokens beside those of an image: class tokens, registers, and what networks do with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, shard
from tests.mpi.device import DEVICE
from tests.mpi.equality import check_keyed, every_mesh

N, C, H, W = 2, 8, 7, 5
HEADS = 2
COUNT = H * W
Meshes = dict[tuple[int, int], Mesh]
Operation = Callable[..., Tensor]


def tokens(x: Tensor, *before: Tensor, after: tuple[Tensor, ...] = ()) -> Tensor:
    """(N, tokens, C): those of the image between others."""
    pixels = x.flatten(2).transpose(1, 2)
    return torch.cat([t.expand(N, -1, -1) for t in before] + [pixels, *after], 1)


def heads(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, HEADS, C // HEADS).transpose(1, 2)


def attended(x: Tensor, **options: object) -> Tensor:
    y = F.scaled_dot_product_attention(heads(x), heads(x.sin()), heads(x.cos()), **options)
    return y.transpose(1, 2).reshape(N, -1, C)


def spelled_out(x: Tensor, bias: Tensor) -> Tensor:
    q, k, v = x.reshape(N, -1, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q @ k.transpose(-2, -1) * 0.5 + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(N, -1, C)


def crossed(queries: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, keys.sin())


def linear(x: Tensor) -> Tensor:
    """Linear attention: the product of keys and values is a sum over all tokens."""
    return x.softmax(-1) @ (x.softmax(1).transpose(1, 2) @ x)


def scaled(registers: Tensor, pixels: Tensor) -> Tensor:
    return pixels * registers.mean(1, keepdim=True)


CLS, REGISTERS = (1, 1, C), (1, 3, C)
CASES: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "the sequence": (tokens, [CLS]),
    "appended": (lambda x, t: tokens(x, after=(t,)), [(N, 2, C)]),
    "before and after": (lambda x, c, t: tokens(x, c, after=(t, t)), [CLS, (N, 2, C)]),
    "in two steps": (lambda x, c, r: torch.cat([r.expand(N, -1, -1), tokens(x, c)], 1), [CLS, CLS]),
    "a token of its own for each sample": (tokens, [(N, 1, C)]),
    "the class token": (lambda x, c: tokens(x, c)[:, 0] + 0 * x.sum(), [CLS]),
    "the last token": (lambda x, t: tokens(x, after=(t,))[:, -1] + 0 * x.sum(), [(N, 2, C)]),
    "a register's numbers": (
        lambda x, r: tokens(x, r)[:, 1:, :3][:, :2] + 0 * x.sum(),
        [REGISTERS],
    ),
    "every other register": (lambda x, r: tokens(x, r)[:, 0:3:2] + 0 * x.sum(), [REGISTERS]),
    "patches": (lambda x, c: tokens(x, c)[:, 1:], [CLS]),
    "patches and a register": (lambda x, r: tokens(x, r)[:, 2:, 1:], [REGISTERS]),
    "patches as an image": (
        lambda x, c: tokens(x, c)[:, 1:].transpose(1, 2).reshape(N, C, H, W),
        [CLS],
    ),
    "split": (
        lambda x, r: scaled(*tokens(x, r).split([3, COUNT], 1)),
        [REGISTERS],
    ),
    "mean of the patches": (lambda x, c: tokens(x, c)[:, 1:].mean(1), [CLS]),
    "mean of all": (lambda x, c: tokens(x, c).mean(1), [CLS]),
    "largest of all": (lambda x, c: tokens(x, c).amax(1), [CLS]),
    "softmax over the tokens": (lambda x, c: tokens(x, c).softmax(1), [CLS]),
    "norm over all": (lambda x, c: F.layer_norm(tokens(x, c), (COUNT + 1, C)), [CLS]),
    "positions": (lambda x, c, p: tokens(x, c) + p, [CLS, (1, COUNT + 1, C)]),
    "positions without the class token": (
        lambda x, c, p: torch.cat([c.expand(N, -1, -1), tokens(x) + p], 1),
        [CLS, (1, COUNT, C)],
    ),
    "one number for all": (lambda x, c, p: tokens(x, c) * p, [CLS, (C,)]),
    "scaled by the class token": (lambda x, c: tokens(x, c) * tokens(x, c)[:, :1], [CLS]),
    "joined channels": (lambda x, c: torch.cat([tokens(x, c), tokens(x, c).sin()], 2), [CLS]),
    "attention": (lambda x, c: attended(tokens(x, c)), [CLS]),
    "attention, tokens before and after": (
        lambda x, c, t: attended(tokens(x, c, after=(t,))),
        [CLS, (N, 2, C)],
    ),
    "attention with a bias": (
        lambda x, c, b: attended(tokens(x, c), attn_mask=b),
        [CLS, (1, HEADS, COUNT + 1, COUNT + 1)],
    ),
    "attention spelled out": (
        lambda x, c, m, b: spelled_out(tokens(x, c) @ m, b),
        [CLS, (C, 3 * C), (1, HEADS, COUNT + 1, COUNT + 1)],
    ),
    "attention of patches to all": (
        lambda x, c: crossed(tokens(x, c)[:, 1:], tokens(x, c)),
        [CLS],
    ),
    "attention of all to patches": (
        lambda x, c: crossed(tokens(x, c), tokens(x, c)[:, 1:]),
        [CLS],
    ),
    "attention of the class token": (
        lambda x, c: crossed(tokens(x, c)[:, :1], tokens(x, c)),
        [CLS],
    ),
    "causal attention": (lambda x, c: attended(tokens(x, c), is_causal=True), [CLS]),
    "dropout": (lambda x, c: F.dropout(tokens(x, c), 0.4), [CLS]),
    "attention with dropout": (lambda x, c: attended(tokens(x, c), dropout_p=0.3), [CLS]),
    "linear attention": (
        lambda x, c: linear(tokens(x, c)),
        [CLS],
    ),
    "tokens and samples in one dim, and apart": (
        lambda x, c: (
            tokens(x, c).transpose(0, 1).reshape((COUNT + 1) * N, C).sin().view(COUNT + 1, N, C)
        ),
        [CLS],
    ),
    "tokens first": (
        lambda x, c: tokens(x, c).transpose(0, 1).reshape(COUNT + 1, N * HEADS, C // HEADS).sin(),
        [CLS],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_beside_pixels(name: str, meshes: Meshes) -> None:
    """Outputs, and gradients of image and tokens, are those of one process."""
    operation, shapes = CASES[name]
    check_keyed(operation, (N, C, H, W), shapes, meshes, name)


def on_device(*shape: int) -> Tensor:
    return torch.rand(shape).to(DEVICE)


def test_only_the_first_part_holds_them(meshes: Meshes) -> None:
    for mesh in meshes.values():
        x = tokens(shard(on_device(N, C, H, W), mesh), on_device(*CLS))
        (top, bottom), (left, right) = mesh.own_box(mesh.layout(N, (H, W))).spatial
        assert x.shape == (N, COUNT + 1, C)
        pixels = (bottom - top) * (right - left)
        assert x.to_local().shape[1] == pixels + (mesh.part == 0)


def test_a_transformer_of_pytorch(meshes: Meshes) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, HEADS, 16, dropout=0.1, batch_first=True).double()

    def network(x: Tensor, c: Tensor) -> Tensor:
        return layer(tokens(x, c))[:, 0] + 0 * x.sum()

    check_keyed(network, (N, C, H, W), [CLS], meshes, "a layer")


def test_of_volumes() -> None:
    def operation(x: Tensor, c: Tensor) -> Tensor:
        return attended(tokens(x, c))

    check_keyed(operation, (N, C, 5, 4, 4), [CLS], every_mesh(3), "attention")


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "some pixels": lambda t: t[:, :4],
    "one pixel": lambda t: t[:, 3],
    "some of both": lambda t: t[:, ::2],
    "seen with other dims": lambda t: t.reshape(N, (COUNT + 1) // 2, 2 * C),
    "not supported": lambda t: t.flip(1),
    "as an image": lambda t: F.conv1d(t.transpose(1, 2), on_device(1, C, 3)),
    "two images": lambda t: torch.cat([t, t], 1),
    "of other tokens": lambda t: t + t[:, 1:],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, meshes: Meshes) -> None:
    for mesh in meshes.values():
        if mesh.grid_comm.size == 1:
            continue
        x = tokens(shard(on_device(N, C, H, W), mesh), on_device(*CLS))
        with pytest.raises(UnsupportedSpatialOp):
            REFUSED[name](x)
