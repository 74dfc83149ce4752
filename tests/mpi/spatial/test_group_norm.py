"""Normalisation of groups, samples and neighbouring channels, with other numbers than PyTorch's."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, close, parameter

EPS = 0.3


def statistics() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 4).double(), torch.linspace(0.5, 2, 4).double()


FUNCTIONS: dict[str, Operation] = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b, EPS),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x, 2, w, b, EPS),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=EPS),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, EPS, False
    ),
    "instance_norm by running statistics": lambda x, w, b: F.instance_norm(
        x, *statistics(), w, b, False, eps=EPS
    ),
    "local_response_norm": lambda x, w, b: (
        F.local_response_norm(x, 3, 0.2, 0.5, 2) * w.sum() + b[0]
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_given_numbers_are_taken(name: str, meshes: dict) -> None:
    rng = random.Random(3)
    arguments = [parameter(rng, 4), parameter(rng, 4)]
    for mesh in meshes.values():
        check(FUNCTIONS[name], parameter(rng, 2, 4, 9, 7), arguments, mesh, f"{name} {mesh.grid}")


def test_running_statistics_of_instances_take_the_momentum(meshes: dict) -> None:
    image = parameter(random.Random(4), 3, 4, 9, 7) + 2

    def updated(x: Tensor, through: str) -> tuple[Tensor, Tensor]:
        mean, variance = statistics()
        if through == "F":
            F.instance_norm(x, mean, variance, momentum=0.7)
        else:
            torch.instance_norm(x, None, None, mean, variance, True, 0.7, 1e-5, False)
        return mean, variance

    for through in ("F", "torch"):
        for mesh in meshes.values():
            pairs = zip(updated(shard(image, mesh), through), updated(image, through), strict=True)
            for ours, plain in pairs:
                close(ours, plain, f"{through} on {mesh.grid} ")


def test_samples_that_are_mixed_with_rows_are_refused(meshes: dict) -> None:
    """Each row of a sample would be a sample of its own."""
    for mesh in meshes.values():
        rows = shard(torch.rand(2, 4, 8, 6), mesh).transpose(1, 2).flatten(0, 1)
        calls: list[Operation] = [lambda x: F.group_norm(x, 2), F.instance_norm]
        for call in calls:
            with pytest.raises(UnsupportedSpatialOp, match="samples are merged with rows"):
                call(rows)
