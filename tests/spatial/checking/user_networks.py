"""Networks as a user's file has them, for the command that checks them."""

from __future__ import annotations

import torch
from torch import nn


class Exact(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Conv2d(3, 4, 3, 2, 1)
        self.body = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return {"map": self.head(self.body(x))}


class Refused(Exact):
    def forward(self, x):
        x = self.body(x)
        x = torch.cumsum(x, 3)
        return self.head(x), torch.linalg.svdvals(x)


class InPlace(Exact):
    def forward(self, x):
        return self.head(self.body(x)).cumsum_(2)


class Noise(Exact):
    def forward(self, x):
        return self.body(x) * torch.rand(())


class Wrong(Exact):
    """What it does with the size of its tile depends on the rank."""

    def forward(self, x):
        tile = x.to_local() if hasattr(x, "to_local") else x
        return self.body(x) * tile.shape[2]


def named(in_channels):
    return nn.Conv2d(7, 2, 1)


def chain():
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(2), nn.AvgPool1d(3, 2), nn.Softmax(2))


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class ViT(nn.Module):
    """Built and named as those of timm."""

    def __init__(self, width, depth=1):
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        self.cls_token = nn.Parameter(torch.ones(1, 1, width))
        layers = [
            nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True) for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x):
        x = self.patch_embed(x)
        return self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1))[:, 0]


class SortedViT(ViT):
    """Takes its tokens in another order."""

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat([x, self.cls_token.expand(len(x), -1, -1)], 1).flip(1)
        return self.blocks(x)[:, 0]


def number():
    return 3


def needs(width):
    return Exact()


thing = 4


def line_of(text: str) -> str:
    """``file:line`` of the first line of this file with `text` in it."""
    with open(__file__) as lines:
        return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if text in line)}"
