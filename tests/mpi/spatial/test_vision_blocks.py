"""What blocks of published vision networks do with tokens and pixels, in plain functions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, shard
from tests.mpi.device import DEVICE
from tests.mpi.equality import check, check_in, parameter, several_ranks

N, C, H, W = 2, 4, 5, 7
T = H * W
Meshes = dict[tuple[int, ...], Mesh]
Block = Callable[..., Tensor]
Shapes = list[tuple[int, ...]]


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


# --- layers that mix tokens


def hidden_layer(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """MLP-Mixer (Tolstikhin et al., 2021): two layers over the tokens."""
    t = tokens(x)
    y = F.linear(F.gelu(F.linear(F.layer_norm(t, (C,)).mT, w, b)), v, c).mT
    return t + y


def one_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """ResMLP (Touvron et al., 2021)."""
    t = tokens(x)
    return t + F.linear(t.mT, w, b).mT


def gate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """gMLP (Liu et al., 2021): half of the channels, mixed over the tokens, times the others."""
    u, v = tokens(x).chunk(2, dim=-1)
    return u * F.linear(F.layer_norm(v, (C // 2,)).mT, w, b).mT


def beside_a_class_token(x: Tensor, token: Tensor, w: Tensor, b: Tensor) -> Tensor:
    t = torch.cat([token.expand(N, -1, -1), tokens(x)], 1)
    return (t + F.linear(t.mT, w, b).mT)[:, 1:]


def per_head(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("nhct,hot->nhco", x.flatten(2).unflatten(1, (2, 2)), w)


SQUARE: Shapes = [(T, T), (T,)]
MIXED: dict[str, tuple[Block, Shapes]] = {
    "one layer": (one_layer, SQUARE),
    "gate": (gate, SQUARE),
    "class token": (beside_a_class_token, [(1, 1, C), (T + 1, T + 1), (T + 1,)]),
    "no bias": (lambda x, w: F.linear(x.flatten(2), w), SQUARE[:1]),
    "matmul": (lambda x, w: x.flatten(2) @ w, SQUARE[:1]),
    "from the left": (lambda x, w: w @ tokens(x), SQUARE[:1]),
    "einsum": (lambda x, w: torch.einsum("btc,ot->boc", tokens(x), w), SQUARE[:1]),
    "einsum of heads": (per_head, [(2, T, T)]),
    "convolution": (lambda x, w, b: F.conv1d(tokens(x), w, b), [(T, T, 1), (T,)]),
    "two convolutions": (
        lambda x, w, v: tokens(x) + F.conv1d(F.gelu(F.conv1d(tokens(x), w)), v),
        [(6, T, 1), (T, 6, 1)],
    ),
    "hidden layer": (hidden_layer, [(9, T), (9,), (T, 9), (T,)]),
    "columns": (lambda x, w, b: x + F.linear(x, w, b), [(W, W), (W,)]),
    "rows": (lambda x, w: x + F.linear(x.mT, w).mT, [(H, H)]),
    "rows and columns by matrices": (lambda x, w, v: w @ x @ v, [(N, C, H, H), (W, W)]),
    "rows by einsum": (lambda x, w: torch.einsum("nchw,hk->nckw", x, w), [(H, H)]),
    "hidden layer over columns": (
        lambda x, w, v: x + F.linear(F.gelu(F.linear(x, w)), v),
        [(11, W), (W, 11)],
    ),
    "few rows": (lambda x, w: F.linear(x.mT, w).mT.sin(), [(2, H)]),
    "a map again": (lambda x, w: F.linear(x.flatten(2), w).view(N, C, H, W).sin(), SQUARE[:1]),
}


def run(name: str, block: Block, shapes: Shapes, meshes: Meshes, image: Tensor) -> None:
    values = [parameter(random.Random(n), *shape) for n, shape in enumerate(shapes)]
    for mesh in meshes.values():
        check(block, image, values, mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("name", MIXED)
def test_mixed_tokens(name: str, meshes: Meshes) -> None:
    run(name, *MIXED[name], meshes, parameter(random.Random(9), N, C, H, W))


def test_mixed_tokens_of_signals_and_volumes() -> None:
    for dims in (1, 3):
        check_in(dims, _mixed_by_cosines, "mixed")


def _mixed_by_cosines(x: Tensor) -> Tensor:
    count = x[0, 0].numel()
    return F.linear(
        x.flatten(2), torch.arange(count**2, device=x.device).cos().view(count, -1).to(x.dtype)
    )


@pytest.mark.parametrize("name", sorted(set(MIXED) - {"hidden layer", "two convolutions"}))
def test_mixed_tokens_stay_split(name: str, meshes: Meshes) -> None:
    block, shapes = MIXED[name]
    values = [torch.rand(shape, device=DEVICE) for shape in shapes]
    for mesh in several_ranks(meshes):
        assert isinstance(
            block(shard(torch.rand(N, C, H, W).to(DEVICE), mesh), *values), SpatialTensor
        )


def test_mixed_tokens_under_autocast(meshes: Meshes) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(N, C, H, W).to(DEVICE), mesh).requires_grad_()
        weight = torch.rand(T, T, device=DEVICE).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = F.linear(x.flatten(2), weight, torch.rand(T, device=DEVICE))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32


# --- relative positions


def shifted(q: Tensor, relative: Tensor) -> Tensor:
    """Logits by relative position, (N, rows, columns, c) to (N, rows, 1, columns, columns).

    Padded and read with one column more, row i is shifted by i.
    """
    samples, rows, columns, _ = q.shape
    x = (q @ relative.mT).reshape(-1, columns, 2 * columns - 1)
    x = F.pad(F.pad(x, [0, 1]).flatten(1), [0, columns - 1])
    x = x.reshape(-1, columns + 1, 2 * columns - 1)[:, :columns, columns - 1 :]
    return x.reshape(samples, rows, 1, columns, columns)


def bottleneck_attention(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """BoTNet (Srinivas et al., 2021)."""
    q, k, v = F.conv2d(x, weight).reshape(N * 3, 2, C // 2, -1).unflatten(0, (N, 3)).unbind(1)
    q, k, v = (t.reshape(N * 2, C // 2, T) for t in (q, k, v))
    image = q.mT.reshape(N * 2, H, W, C // 2)
    by_columns = shifted(image, columns).expand(-1, -1, H, -1, -1).permute(0, 1, 3, 2, 4)
    by_rows = shifted(image.transpose(1, 2), rows).expand(-1, -1, W, -1, -1).permute(0, 3, 1, 4, 2)
    logits = (by_rows + by_columns).reshape(N * 2, T, T)
    return ((q.mT @ k + logits).softmax(-1) @ v.mT).mT.reshape(N, C, H, W)


def halo_attention(x: Tensor, weight: Tensor) -> Tensor:
    """Blocks of 2 x 2 queries see 4 x 4 keys, without logits by position (Vaswani et al., 2021)."""
    rows, columns = H // 2, W // 2
    q = x[:, :, : 2 * rows, : 2 * columns].reshape(N, C, rows, 2, columns, 2)
    q = q.permute(0, 2, 4, 3, 5, 1).reshape(N, rows * columns, 4, C)
    k = F.pad(F.conv2d(x, weight)[:, :, : 2 * rows, : 2 * columns], (1, 1, 1, 1))
    k = k.unfold(2, 4, 2).unfold(3, 4, 2).reshape(N, C, rows * columns, 16).permute(0, 2, 3, 1)
    y = ((q @ k.mT).softmax(-1) @ k).reshape(N, rows, columns, 2, 2, C)
    return y.permute(0, 5, 1, 3, 2, 4).reshape(N, C, 2 * rows, 2 * columns)


def content_and_positions(x: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """LambdaNetworks (Bello, 2021): positions by a convolution along rows and columns of values."""
    q, k, v = F.conv2d(x, weight).split([C, C, 3], 1)
    q, v = q.reshape(N, 2, 2, T).mT, v.reshape(N, 3, T).mT
    content = q @ (k.reshape(N, 2, 2, T).softmax(-1) @ v.unsqueeze(1))
    by_position = F.conv3d(v.reshape(N, 1, H, W, 3), kernel, padding=(1, 1, 0))
    by_position = by_position.reshape(N, 1, 2, T, 3).transpose(2, 3)
    position = (q.unsqueeze(-2) @ by_position).squeeze(-2)
    return (content + position).mT.reshape(N, 6, H, W)


# --- others


def convolved_windows(x: Tensor, weight: Tensor) -> Tensor:
    """EfficientViT (Liu et al., 2023): each window of 2 x 2 is an image of its own."""
    x = F.pad(x, (0, W % 2, 0, H % 2))
    rows, columns = x.shape[2] // 2, x.shape[3] // 2
    y = x.view(N, C, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, C, 2, 2)
    y = F.conv2d(y, weight, padding=1, groups=C).sin()
    y = y.view(N, rows, columns, C, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return y.reshape(N, C, 2 * rows, 2 * columns)


def values_first(x: Tensor, weight: Tensor) -> Tensor:
    """SHViT (Yun and Ro, 2024): values are multiplied by weights that are turned round."""
    q, k, v = F.conv2d(x, weight).flatten(2).chunk(3, 1)
    weights = (q.transpose(-2, -1) @ k).softmax(-1)
    return (v @ weights.transpose(-2, -1)).reshape(N, C, H, W)


def averaged_keys(x: Tensor, weight: Tensor) -> Tensor:
    """Next-ViT (Li et al., 2022): keys are means of tokens that follow on each other."""
    q = tokens(x)
    k = F.linear(F.avg_pool1d(x.flatten(2), 3, 3).mT, weight)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None]).squeeze(1)


def padded_tokens(x: Tensor, token: Tensor) -> Tensor:
    """CoaT (Xu et al., 2021): what is for pixels alone is 0 for the class token."""
    t = torch.cat([token.expand(N, -1, -1), tokens(x)], 1)
    return t * F.pad(tokens(x).sin(), (0, 0, 1, 0), value=0.5) + F.pad(t[:, 1:], (1, -1, 1, 0))


BLOCKS: dict[str, tuple[Block, Shapes]] = {
    "bottleneck attention": (
        bottleneck_attention,
        [(3 * C, C, 1, 1), (2 * H - 1, C // 2), (2 * W - 1, C // 2)],
    ),
    "halo attention": (halo_attention, [(C, C, 1, 1)]),
    "lambda layer": (content_and_positions, [(2 * C + 3, C, 1, 1), (2, 1, 3, 3, 1)]),
    "convolved windows": (convolved_windows, [(C, 1, 3, 3)]),
    "padded tokens": (padded_tokens, [(1, 1, C)]),
    "values first": (values_first, [(3 * C, C, 1, 1)]),
    "averaged keys": (averaged_keys, [(C, C)]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, meshes: Meshes) -> None:
    run(name, *BLOCKS[name], meshes, parameter(random.Random(9), N, C, H, W))


REFUSED: dict[str, Block] = {
    "means that overlap": lambda x: F.avg_pool1d(x.flatten(2), 3, 2),
    "windows of tokens": lambda x: x.flatten(2).unfold(2, 3, 1),
    "cropped tokens": lambda x: F.pad(x.flatten(2), (1, -1)),
    "reflected tokens": lambda x: F.pad(x.flatten(2), (1, 1), "reflect"),
    "some tokens": lambda x: x.flatten(2)[:, :, 3:],
    "some rows of all samples": lambda x: x.transpose(1, 2).flatten(0, 1)[1:],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, meshes: Meshes) -> None:
    for mesh in several_ranks(meshes):
        with pytest.raises(UnsupportedSpatialOp):
            REFUSED[name](shard(torch.ones(N, C, H, W, device=DEVICE), mesh))
