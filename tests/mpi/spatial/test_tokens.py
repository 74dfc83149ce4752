"""What published vision networks do with tokens and pixels, and with tokens beside them.

Class tokens and registers belong to no pixel.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import SpatialTensor, shard
from tests.mpi.device import DEVICE
from tests.mpi.equality import Operation, check_keyed, every_mesh, several_ranks
from tests.mpi.spatial.shared import Cases, Shapes, tokens

N, C, H, W = 2, 4, 5, 7
T = H * W

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


def beside_a_class_token(x: Tensor, token: Tensor, w: Tensor, b: Tensor) -> Tensor:
    t = torch.cat([token.expand(N, -1, -1), tokens(x)], 1)
    return (t + F.linear(t.mT, w, b).mT)[:, 1:]


def per_head(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("nhct,hot->nhco", x.flatten(2).unflatten(1, (2, 2)), w)


SQUARE: Shapes = [(T, T), (T,)]
MIXED: dict[str, tuple[Operation, Shapes]] = {
    "one layer": (one_layer, SQUARE),
    "class token": (beside_a_class_token, [(1, 1, C), (T + 1, T + 1), (T + 1,)]),
    "einsum of heads": (per_head, [(2, T, T)]),
    "convolution": (lambda x, w, b: F.conv1d(tokens(x), w, b), [(T, T, 1), (T,)]),
    "two convolutions": (
        lambda x, w, v: tokens(x) + F.conv1d(F.gelu(F.conv1d(tokens(x), w)), v),
        [(6, T, 1), (T, 6, 1)],
    ),
    "hidden layer": (hidden_layer, [(9, T), (9,), (T, 9), (T,)]),
    "rows": (lambda x, w: x + F.linear(x.mT, w).mT, [(H, H)]),
}


# --- relative positions


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


BLOCKS: dict[str, tuple[Operation, Shapes]] = {
    "lambda layer": (content_and_positions, [(2 * C + 3, C, 1, 1), (2, 1, 3, 3, 1)]),
    "convolved windows": (convolved_windows, [(C, 1, 3, 3)]),
    "padded tokens": (padded_tokens, [(1, 1, C)]),
    "values first": (values_first, [(3 * C, C, 1, 1)]),
    "averaged keys": (averaged_keys, [(C, C)]),
}

# --- tokens beside those of an image

HEADS = 2


def among(x: Tensor, *before: Tensor, after: tuple[Tensor, ...] = ()) -> Tensor:
    """(N, tokens, C): those of the image between others."""
    return torch.cat([t.expand(N, -1, -1) for t in before] + [tokens(x), *after], 1)


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


CLS, REGISTERS, COUNT = (1, 1, C), (1, 3, C), T

BETWEEN: dict[str, tuple[Operation, Shapes]] = {
    "before and after": (lambda x, c, t: among(x, c, after=(t, t)), [CLS, (N, 2, C)]),
    "the class token": (lambda x, c: among(x, c)[:, 0] + 0 * x.sum(), [CLS]),
    "a token after the patches": (
        lambda x, c, t: among(x, c, after=(t, t.sin()))[:, -1] + 0 * x.sum(),
        [CLS, (N, 2, C)],
    ),
    "tokens after the patches": (
        lambda x, c, t: among(x, c, after=(t,))[:, -2:].cos() + 0 * x.sum(),
        [CLS, (N, 3, C)],
    ),
    "patches as an image": (
        lambda x, c: among(x, c)[:, 1:].transpose(1, 2).reshape(N, C, H, W),
        [CLS],
    ),
    "largest of all": (lambda x, c: among(x, c).amax(1), [CLS]),
    "softmax over the tokens": (lambda x, c: among(x, c).softmax(1), [CLS]),
    "norm over all": (lambda x, c: F.layer_norm(among(x, c), (COUNT + 1, C)), [CLS]),
    "positions without the class token": (
        lambda x, c, p: torch.cat([c.expand(N, -1, -1), among(x) + p], 1),
        [CLS, (1, COUNT, C)],
    ),
    "attention": (lambda x, c: attended(among(x, c)), [CLS]),
    "attention with a bias": (
        lambda x, c, b: attended(among(x, c), attn_mask=b),
        [CLS, (1, HEADS, COUNT + 1, COUNT + 1)],
    ),
    "attention spelled out": (
        lambda x, c, m, b: spelled_out(among(x, c) @ m, b),
        [CLS, (C, 3 * C), (1, HEADS, COUNT + 1, COUNT + 1)],
    ),
    "attention of the class token": (
        lambda x, c: crossed(among(x, c)[:, :1], among(x, c)),
        [CLS],
    ),
    "dropout": (lambda x, c: F.dropout(among(x, c), 0.4), [CLS]),
    "attention with dropout": (lambda x, c: attended(among(x, c), dropout_p=0.3), [CLS]),
    "tokens and samples in one dim, and apart": (
        lambda x, c: (
            among(x, c).transpose(0, 1).reshape((COUNT + 1) * N, C).sin().view(COUNT + 1, N, C)
        ),
        [CLS],
    ),
}


def layer_of_pytorch() -> Operation:
    layer = nn.TransformerEncoderLayer(C, HEADS, 16, dropout=0.1, batch_first=True).double()
    return lambda x, c: layer(among(x, c))[:, 0] + 0 * x.sum()


CASES: Cases = {
    **{
        name: (operation, (N, C, H, W), shapes)
        for name, (operation, shapes) in {**MIXED, **BLOCKS, **BETWEEN}.items()
    },
    "a layer of PyTorch": (layer_of_pytorch(), (N, C, H, W), [CLS]),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    """Outputs, and gradients of image and tokens, are those of one process."""
    check_keyed(*CASES[name], meshes, name)


@pytest.mark.parametrize("name", sorted(set(MIXED) - {"hidden layer", "two convolutions"}))
def test_mixed_tokens_stay_split(name: str, meshes: dict) -> None:
    block, shapes = MIXED[name]
    values = [torch.rand(shape, device=DEVICE) for shape in shapes]
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(N, C, H, W).to(DEVICE), mesh)
        assert isinstance(block(x, *values), SpatialTensor)


def test_only_the_first_part_holds_tokens_beside_pixels(meshes: dict) -> None:
    for mesh in meshes.values():
        image, token = torch.rand(N, C, H, W).to(DEVICE), torch.rand(CLS).to(DEVICE)
        x = among(shard(image, mesh), token)
        (top, bottom), (left, right) = mesh.own_box(mesh.layout(N, (H, W))).spatial
        assert x.shape == (N, COUNT + 1, C)
        pixels = (bottom - top) * (right - left)
        assert x.to_local().shape[1] == pixels + (mesh.part == 0)


@pytest.mark.tiles
def test_of_volumes() -> None:
    def operation(x: Tensor, c: Tensor) -> Tensor:
        return attended(among(x, c))

    check_keyed(operation, (N, C, 5, 4, 4), [CLS], every_mesh(3), "attention")
