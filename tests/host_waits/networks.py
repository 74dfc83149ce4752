"""Networks whose steps are counted: ours, and a plain definition of ConvNeXt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models import resnet50, unet, vit


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


SIZE = (1024, 1024)
CLASSES = 10

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": partial(resnet50, num_classes=CLASSES),
    "U-Net": partial(unet, num_classes=CLASSES),
    "ConvNeXt-T": partial(convnext_tiny, CLASSES),
    "ViT-S/16": partial(vit, num_classes=CLASSES, pool="mean"),
}
SEGMENTS = {"U-Net"}
"""Those that give a class to every pixel."""
