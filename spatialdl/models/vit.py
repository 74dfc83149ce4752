"""Vision Transformer: classification of images (H, W), volumes (D, H, W) or signals (L).

Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021 (https://arxiv.org/abs/2010.11929),
with norms before attention and MLP. Register tokens are those of Darcet et al., "Vision
Transformers Need Registers", ICLR 2024 (https://arxiv.org/abs/2309.16588). Position embeddings are
sines and cosines, as in Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022
(https://arxiv.org/abs/2205.01580): they have no weights, so one network takes images of any size
divisible by the patch.

Parameters have timm's names (``blocks.0.attn.qkv.weight``), without ``pos_embed``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_SLOWEST = 10_000.0
"""Longest wavelength of the position embedding, divided by 2 pi, in tokens."""


class PatchEmbedding(nn.Module):
    """Patch embedding with position embedding.

    ``forward`` takes (N, in_channels, *size) and returns (N, tokens, width), in row-major order.

    Args:
        in_channels: channels of the image.
        width: channels of a token; a multiple of ``2 * dims``.
        patch: pixels of a patch along each spatial dim.
        dims: spatial dims of the image.
    """

    def __init__(self, in_channels: int, width: int, patch: int, dims: int) -> None:
        super().__init__()
        self.width, self.patch, self.dims = width, patch, dims
        self.proj = _CONVOLUTION[dims](in_channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        if any(n % self.patch for n in x.shape[2:]):
            size = " x ".join(str(n) for n in x.shape[2:])
            raise ValueError(
                f"patches of {self.patch} do not divide an image of {size}: crop or pad images to "
                f"multiples of {self.patch}, or use another patch"
            )
        x = self.proj(x)
        for dim in range(self.dims):  # dim by dim, so that no table is as large as x
            x = x + self.positions(dim, x.shape[2 + dim], x.device).to(self.proj.weight.dtype)
        return x.flatten(2).transpose(1, 2)

    def positions(self, dim: int, size: int, device: torch.device) -> Tensor:
        """The position embedding along one spatial dim: sines, then cosines.

        The last spatial dim uses the first ``width / dims`` channels, and so on; the rest are 0.

        Args:
            dim: 0 is the first spatial dim.
            size: tokens along it.
            device: device of the result.

        Returns:
            (width, 1, ..., size, ..., 1), broadcastable to (N, width, *tokens): float64 in a
            network of float64, else float32.
        """
        waves = self.width // (2 * self.dims)
        dtype = torch.promote_types(self.proj.weight.dtype, torch.float32)
        exponents = torch.arange(waves, device=device, dtype=dtype) / max(waves - 1, 1)
        angles = torch.arange(size, device=device, dtype=dtype) * _SLOWEST ** -exponents[:, None]
        own = torch.cat([angles.sin(), angles.cos()])
        first = (self.dims - 1 - dim) * 2 * waves
        table = F.pad(own, (0, 0, first, self.width - first - 2 * waves))
        return table.view(self.width, *(size if at == dim else 1 for at in range(self.dims)))


class Attention(nn.Module):
    """Multi-head self-attention over tokens (N, tokens, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.drop(self.proj(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers over the channels of tokens (N, tokens, width)."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(F.gelu(self.fc1(x)))))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, int(mlp_ratio * width), dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Vision Transformer; ViT-S/16 by default, 22 million parameters at 1000 classes.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes). With ``dims=3`` it takes
    (N, in_channels, D, H, W), with ``dims=1`` (N, in_channels, L). The patch must divide each size.

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        patch: pixels of a patch along each spatial dim.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads per block.
        mlp_ratio: hidden channels of an MLP, as a multiple of `width`.
        pool: input of the head: "class", the class token, or "mean", the mean of the patch tokens.
        registers: number of register tokens, which the head ignores.
        dropout: dropout after the position embedding and after each linear layer of a block except
            those of queries, keys and values.
        dims: spatial dims of the image, 1 to 3.

    Raises:
        ValueError: an argument is invalid, or the patch does not divide an image.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        patch: int = 16,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        pool: str = "class",
        registers: int = 0,
        dropout: float = 0.0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        if dims not in _CONVOLUTION:
            raise ValueError(f"a ViT is for images of 1 to 3 dims, got dims={dims}")
        if pool not in ("class", "mean"):
            raise ValueError(f'pool must be "class" or "mean", got "{pool}"')
        if min(num_classes, in_channels, patch, width, depth, heads, registers + 1) < 1:
            raise ValueError(
                "a ViT needs at least 1 class, channel, pixel, block and head, and no fewer than 0 "
                f"registers, got num_classes={num_classes}, in_channels={in_channels}, "
                f"patch={patch}, width={width}, depth={depth}, heads={heads}, registers={registers}"
            )
        if width % heads or width % (2 * dims):
            raise ValueError(
                f"width={width} must be a multiple of heads={heads} and of {2 * dims} (sines and "
                f"cosines of {dims} coordinates)"
            )
        if mlp_ratio * width < 1:
            raise ValueError(f"mlp_ratio={mlp_ratio} leaves no hidden channel in an MLP")
        self.pool = pool
        self.prefix_tokens = (pool == "class") + registers  # class token and registers
        self.patch_embed = PatchEmbedding(in_channels, width, patch, dims)
        if pool == "class":
            self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        if registers:
            self.reg_token = nn.Parameter(torch.empty(1, registers, width))
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, mlp_ratio, dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self.apply(_initialise)
        for token in self._tokens():
            nn.init.trunc_normal_(token, std=0.02)

    def _tokens(self) -> list[Tensor]:
        """Class token and registers (1, count, width), if any."""
        found = (getattr(self, name, None) for name in ("cls_token", "reg_token"))
        return [one for one in found if one is not None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        if self.prefix_tokens:
            x = torch.cat([*(one.expand(len(x), -1, -1) for one in self._tokens()), x], 1)
        x = self.norm(self.blocks(self.pos_drop(x)))
        x = x[:, 0] if self.pool == "class" else x[:, self.prefix_tokens :].mean(1)
        return self.head(x)  # type: ignore[no-any-return]


vit = VisionTransformer


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / module.weight[0].numel()))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
