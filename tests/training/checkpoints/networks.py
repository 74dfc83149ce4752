"""A network whose runs are saved and go on; it starts no MPI."""

from __future__ import annotations

from torch import nn


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
