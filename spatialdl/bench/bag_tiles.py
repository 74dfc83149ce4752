"""Synthetic tiles of the benchmarks of bags."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(start: int, stop: int, side: int, seed: int = 0) -> Tensor:
    """Noise tiles (stop - start, 3, side, side); each depends on its index and the seed only."""
    tiles = [
        torch.rand(3, side, side, generator=torch.Generator().manual_seed((seed << 32) + number))
        for number in range(start, stop)
    ]
    return torch.stack(tiles) if tiles else torch.empty(0, 3, side, side)
