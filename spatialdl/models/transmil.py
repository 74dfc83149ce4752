"""TransMIL: a transformer over the tiles of a slide, with linear cost.

Shao et al., "TransMIL: Transformer based Correlated Multiple Instance Learning for Whole Slide
Image Classification", NeurIPS 2021 (https://arxiv.org/abs/2106.00908). Its attention is that of
Xiong et al., "Nystromformer", AAAI 2021 (https://arxiv.org/abs/2102.03902).

Tiles are arranged in a square in their order in the bag, so a bag cannot be split over ranks; data
replicas work.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models.bags import Embedding, check_sizes


class NystromAttention(nn.Module):
    """Nystrom approximation of self-attention over tokens (N, tokens, width).

    Args:
        width: width of a token, a multiple of `heads`.
        heads: attention heads.
        landmarks: means of queries and keys, each over equally many neighbouring tokens.
        iterations: iterations of the pseudo-inverse of their matrix.
        kernel: kernel size of the convolution of values along tokens that is added.
    """

    def __init__(
        self, width: int, heads: int, landmarks: int, iterations: int = 6, kernel: int = 33
    ) -> None:
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv2d(heads, heads, (kernel, 1), padding="same", groups=heads, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        near, inverse, far, v = self._factors(x)
        y = near @ inverse @ (far @ v) + self.conv(v)
        return self.proj(y.transpose(1, 2).flatten(2)[:, -tokens:])  # type: ignore[no-any-return]

    def first_row(self, x: Tensor) -> Tensor:
        """(N, tokens): attention of the first token, mean over heads."""
        tokens = x.shape[1]
        near, inverse, far, _ = self._factors(x)
        return (near[:, :, -tokens].unsqueeze(2) @ inverse @ far)[:, :, 0, -tokens:].mean(1)

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Three factors of the attention matrix, and the values.

        Tokens are padded with leading zeros, so that all means are over equally many.
        """
        each = math.ceil(x.shape[1] / self.landmarks)
        x = F.pad(x, (0, 0, each * self.landmarks - x.shape[1], 0))
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        q = q * q.shape[-1] ** -0.5
        mean_q, mean_k = (one.unflatten(2, (self.landmarks, each)).mean(3) for one in (q, k))
        near = (q @ mean_k.transpose(2, 3)).softmax(-1)
        between = (mean_q @ mean_k.transpose(2, 3)).softmax(-1)
        far = (mean_q @ k.transpose(2, 3)).softmax(-1)
        return near, _inverse(between, self.iterations), far, v


def _inverse(matrix: Tensor, iterations: int) -> Tensor:
    """Iterative Moore-Penrose inverse: Xiong et al. 2021, equation 11."""
    columns, rows = matrix.abs().sum(-2), matrix.abs().sum(-1)
    found = matrix.transpose(-1, -2) / (columns.max() * rows.max())
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        both = matrix @ found
        found = 0.25 * found @ (13 * one - both @ (15 * one - both @ (7 * one - both)))
    return found


class TransMIL(nn.Module):
    """TransMIL: two attention layers, with convolutions over the square of tiles between them.

    Args:
        num_classes: outputs of the last layer.
        in_channels: width of the features.
        width: width of a token, a multiple of `heads`.
        heads: attention heads.
        landmarks: landmarks of the attention; None for half of `width`.
        dropout: dropout after the embedding and the attention.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 1024,
        width: int = 512,
        heads: int = 8,
        landmarks: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        landmarks = max(1, width // 2) if landmarks is None else landmarks
        sizes = {"num_classes": num_classes, "in_channels": in_channels, "landmarks": landmarks}
        check_sizes(**sizes, width=width, heads=heads)
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.embed = Embedding(in_channels, width, dropout)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.attn1 = NystromAttention(width, heads, landmarks)
        self.attn2 = NystromAttention(width, heads, landmarks)
        self.positions = nn.ModuleList(
            nn.Conv2d(width, width, side, padding=side // 2, groups=width) for side in (7, 5, 3)
        )
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._first_layer(x)
        x = x + self.drop(self.attn2(self.norm2(x)))
        return self.head(self.norm(x[:, 0]))  # type: ignore[no-any-return]

    def _first_layer(self, x: Tensor) -> Tensor:
        """Class token and tiles after the first layer; the first tiles are repeated to a square."""
        tiles = self.embed(x)
        side = math.ceil(tiles.shape[1] ** 0.5)
        while tiles.shape[1] < side * side:  # more than once only for very small bags
            tiles = torch.cat([tiles, tiles[:, : side * side - tiles.shape[1]]], 1)
        x = torch.cat([self.cls_token.expand(len(tiles), -1, -1), tiles], 1)
        x = x + self.drop(self.attn1(self.norm1(x)))
        square = x[:, 1:].transpose(1, 2).reshape(len(x), -1, side, side)
        square = square + sum(conv(square) for conv in self.positions)
        return torch.cat([x[:, :1], square.flatten(2).transpose(1, 2)], 1)

    def attention(self, x: Tensor) -> Tensor:
        """(N, 1, tiles): attention of the class token in the last layer."""
        row = self.attn2.first_row(self.norm2(self._first_layer(x)))
        return row[:, None, 1 : 1 + x.shape[2]]


transmil = TransMIL
