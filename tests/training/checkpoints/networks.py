"""Networks for tests of resuming, without MPI."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network(num_classes: int = 3, in_channels: int = 3) -> nn.Sequential:
    """BatchNorm, dropout of channels and of numbers, widths that divide by nothing."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 7, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(7, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(5, num_classes),
    )


class Mean(nn.Module):
    """Keeps a running mean of each channel, a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0, 1, 7).view(7, 1, 1))
        self.register_buffer("last", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last = 0.5 * self.last + x.detach().mean((0, 2, 3))
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3)).view(7, 1, 1)
        return x - self.mean


def centred(num_classes: int = 3, in_channels: int = 3) -> nn.Sequential:
    """Its buffers are assigned, by a layer of its own."""
    layers = nn.Conv2d(in_channels, 7, 3), Mean(), nn.ReLU(), nn.Conv2d(7, 5, 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, num_classes))
