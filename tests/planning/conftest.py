from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from spatialdl.planning.cluster import Cluster, cluster_of
from spatialdl.planning.job import PlannedJob

FIGURES = {
    "name": "paper",
    "memory_gb": 1,
    "ranks_per_node": 4,
    "cores": None,
    "lone_speed": 1.0,
    "base_mb": 0,
    "rates": {
        "conv": {"flops_per_second": 1e9, "bytes_per_second": 1e30},
        "pointwise": {"bytes_per_second": 1e30},
    },
    "within_node": {"seconds": 1e-6, "bytes_per_second": 1e9},
    "between_nodes": {"seconds": 1e-5, "bytes_per_second": 1e8},
}


@pytest.fixture
def figures() -> dict:
    """Settings of a cluster on which convolutions and messages alone take time."""
    return dict(FIGURES)


@pytest.fixture
def paper(figures) -> Cluster:
    return cluster_of(figures)


def network() -> nn.Sequential:
    """Four blocks of equal work and memory."""

    def block(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.Tanh())

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(block(8), block(8), block(8), block(8), head)


def planned(
    model: nn.Module, image: tuple[int, ...], batch: int = 4, segments: bool = False
) -> PlannedJob:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return PlannedJob(model, image, batch, sgd, segments=segments, on_cpu=False)


@pytest.fixture
def job() -> PlannedJob:
    """Eight images of 8 channels, 16 x 12, without an optimizer's state."""
    return planned(network(), (8, 16, 12), 8)


class Writing(nn.Module):
    """Its channels cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y[:, 2] = 0
        return y
