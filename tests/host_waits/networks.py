"""Networks whose steps are counted: ours, and plain definitions of two others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models import resnet50, unet


class _ConvNeXtBlock(nn.Module):
    """Liu et al., "A ConvNet for the 2020s", 2022, figure 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrower(F.gelu(self.wider(y)))
        return x + y.permute(0, 3, 1, 2)


class _ChannelNorm(nn.LayerNorm):
    """Over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny(num_classes: int) -> nn.Module:
    """The tiny one of the paper, 29 million parameters at 1,000 classes."""
    widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), _ChannelNorm(96, eps=1e-6)]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage > 0:
            before = widths[stage - 1]
            layers += [_ChannelNorm(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
        layers += [_ConvNeXtBlock(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, num_classes)]
    return nn.Sequential(*layers, *head)


class _TransformerBlock(nn.Module):
    """Attention and two linear layers, each after its norm (Dosovitskiy et al., 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.narrower(F.gelu(self.wider(self.norm2(x))))


class VisionTransformer(nn.Module):
    """ViT-S/16 whose head takes the mean of all tokens; there is no class token."""

    def __init__(self, num_classes: int, size: tuple[int, int], width: int = 384) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        tokens = (size[0] // 16) * (size[1] // 16)
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.Sequential(*(_TransformerBlock(width, 6) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]


SIZE = (1024, 1024)
CLASSES = 10

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": partial(resnet50, num_classes=CLASSES),
    "U-Net": partial(unet, num_classes=CLASSES),
    "ConvNeXt-T": partial(convnext_tiny, CLASSES),
    "ViT-S/16": partial(VisionTransformer, CLASSES, SIZE),
}
SEGMENTS = {"U-Net"}
"""Those that give a class to every pixel."""
