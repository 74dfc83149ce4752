"""Multiple instance learning: classification of slides by the features of their tiles.

A bag is a signal (N, D, tiles): all tiles of a slide, with one label. D is the width of the
features.

``attention`` of each network returns the weights of tiles, (N, 1, tiles), or per class, (N,
num_classes, tiles), for a heat map of the slide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.models.vit import TransformerBlock


def check_sizes(**sizes: int) -> None:
    """Check that sizes are at least 1.

    Raises:
        ValueError: a size is smaller.
    """
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be at least 1")


def check_bag(x: Tensor, in_channels: int) -> None:
    """Check the shape of a bag of features.

    Raises:
        ValueError: it is not (N, in_channels, tiles).
    """
    if x.dim() != 3 or x.shape[1] != in_channels or x.shape[2] < 1:
        raise ValueError(
            f"a bag is (N, {in_channels}, tiles) with at least one tile, got {tuple(x.shape)}: set "
            "model.in_channels to the width of the features"
        )


class Embedding(nn.Module):
    """Embedding of tiles (N, in_channels, tiles) to (N, tiles, width): linear, ReLU, dropout."""

    def __init__(self, in_channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.linear = nn.Linear(in_channels, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        check_bag(x, self.in_channels)
        return self.drop(self.linear(x.transpose(1, 2)).relu())  # type: ignore[no-any-return]


class GatedAttention(nn.Module):
    """Gated attention scores of tiles, before the softmax over tiles.

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018
    (https://arxiv.org/abs/1802.04712), equation 9.

    Args:
        width: width of the tiles (N, tiles, width).
        hidden: width of the tanh branch and of its gate.
        maps: attention maps, ``forward`` returns (N, tiles, maps).
        dropout: dropout of the gated product.
    """

    def __init__(self, width: int, hidden: int, maps: int, dropout: float) -> None:
        super().__init__()
        self.values, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.drop = nn.Dropout(dropout)
        self.score = nn.Linear(hidden, maps)

    def forward(self, tiles: Tensor) -> Tensor:
        gated = self.values(tiles).tanh() * self.gate(tiles).sigmoid()
        return self.score(self.drop(gated))  # type: ignore[no-any-return]


class BagPooling(nn.Module):
    """Mean or max pooling over tiles, then a linear layer.

    Args:
        num_classes: outputs of the last layer.
        in_channels: width of the features.
        width: width of the embedded tiles.
        pool: "mean" or "max".
        dropout: dropout after the embedding.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 1024,
        width: int = 512,
        pool: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, in_channels=in_channels, width=width)
        if pool not in ("mean", "max"):
            raise ValueError(f'pool must be "mean" or "max", got "{pool}"')
        self.pool = pool
        self.embed = Embedding(in_channels, width, dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.embed(x)
        bag = tiles.mean(1) if self.pool == "mean" else tiles.amax(1)
        return self.head(bag)  # type: ignore[no-any-return]

    def attention(self, x: Tensor) -> Tensor:
        """(N, num_classes, tiles): output of the head for each tile."""
        return self.head(self.embed(x)).transpose(1, 2)  # type: ignore[no-any-return]


class AttentionMIL(nn.Module):
    """Gated attention pooling over tiles, then a linear layer.

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018
    (https://arxiv.org/abs/1802.04712), equations 8 and 9.

    Args:
        num_classes: outputs of the last layer.
        in_channels: width of the features.
        width: width of the embedded tiles.
        hidden: hidden width of the attention.
        dropout: dropout after the embedding and in the attention.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 1024,
        width: int = 512,
        hidden: int = 256,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        check_sizes(**sizes, width=width, hidden=hidden)
        self.embed = Embedding(in_channels, width, dropout)
        self.attend = GatedAttention(width, hidden, 1, dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.embed(x)
        weights = self.attend(tiles).softmax(1)
        bag = (weights.transpose(1, 2) @ tiles).flatten(1)
        return self.head(bag)  # type: ignore[no-any-return]

    def attention(self, x: Tensor) -> Tensor:
        """(N, 1, tiles): weights of the tiles, with sum 1."""
        return self.attend(self.embed(x)).softmax(1).transpose(1, 2)  # type: ignore[no-any-return]


class BagTransformer(nn.Module):
    """Self-attention over all tiles and a class token, which the head classifies.

    Blocks are those of `models.vit`. Positions of tiles are not used.

    Args:
        num_classes: outputs of the last layer.
        in_channels: width of the features.
        width: width of a token, a multiple of `heads`.
        depth: number of blocks.
        heads: attention heads per block.
        mlp_ratio: hidden channels of an MLP, as a multiple of `width`.
        dropout: dropout after the embedding and the linear layers of a block.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 1024,
        width: int = 384,
        depth: int = 2,
        heads: int = 6,
        mlp_ratio: float = 2.0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        check_sizes(**sizes, width=width, depth=depth, heads=heads, mlp=int(mlp_ratio * width))
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.embed = Embedding(in_channels, width, dropout)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        blocks = (TransformerBlock(width, heads, mlp_ratio, dropout) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self._tokens(x)))[:, 0])  # type: ignore[no-any-return]

    def _tokens(self, x: Tensor) -> Tensor:
        """The class token, then the tiles."""
        tiles = self.embed(x)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), tiles], 1)

    def attention(self, x: Tensor) -> Tensor:
        """(N, 1, tiles): attention of the class token in the last block, mean over heads."""
        tokens = self.blocks[:-1](self._tokens(x))
        last: Any = self.blocks[-1]
        heads, tokens = last.attn.heads, last.norm1(tokens)
        q, k, _ = (y.unflatten(-1, (heads, -1)) for y in last.attn.qkv(tokens).chunk(3, -1))
        scores = torch.einsum("nhc,nthc->nht", q[:, 0], k) / q.shape[-1] ** 0.5
        weights: Tensor = scores.softmax(2)[:, :, 1:].mean(1, keepdim=True)
        return weights


bag_pooling = BagPooling
abmil = AttentionMIL
bag_transformer = BagTransformer
