"""The aggregator and the tiles of the benchmark of bags."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """Tiles (N, D, tiles) added up by gated attention, then a small perceptron.

    Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018
    (https://arxiv.org/abs/1802.04712), equations 8 and 9.

    Args:
        width: D.
        hidden: of the attention, and of the perceptron.
        maps: attention maps, each of which adds up the tiles for itself.
        num_classes: outputs.
    """

    def __init__(self, width: int, hidden: int = 32, maps: int = 1, num_classes: int = 2) -> None:
        super().__init__()
        self.values, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.score = nn.Linear(hidden, maps)
        self.head = nn.Sequential(
            nn.Linear(maps * width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )

    def forward(self, bag: Tensor) -> Tensor:
        tiles = bag.transpose(1, 2)
        scores = self.score(self.values(tiles).tanh() * self.gate(tiles).sigmoid())
        pooled = scores.softmax(1).transpose(1, 2) @ tiles
        return self.head(pooled.flatten(1))  # type: ignore[no-any-return]


def noise(start: int, stop: int, side: int, seed: int = 0) -> Tensor:
    """Tiles (stop - start, 3, side, side) of noise, each by its number alone."""
    tiles = [
        torch.rand(3, side, side, generator=torch.Generator().manual_seed((seed << 32) + number))
        for number in range(start, stop)
    ]
    return torch.stack(tiles) if tiles else torch.empty(0, 3, side, side)
