"""Values taken along a dim that is not split; the rest of it is in the tests of losses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, parameter

N, C, H, W = 2, 4, 7, 6


def places(*shape: int) -> Tensor:
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "shape",
    [(N, 2, H, W), (N, 9, H, W), (1, 3, H, W)],  # fewer, more, the same for all samples
)
def test_take_along_dim(shape: tuple[int, ...], meshes: dict) -> None:
    chosen = places(*shape)
    calls: list[Operation] = [
        lambda x: torch.take_along_dim(x, chosen, 1),
        lambda x: x.take_along_dim(indices=chosen, dim=-3),
        lambda x: torch.take_along_dim(x.cos(), x.argsort(1), 1),
    ]
    for mesh in meshes.values():
        for call in calls:
            check(call, parameter(random.Random(1), N, C, H, W), [], mesh, f"on {mesh.grid}: ")


def test_take_along_dim_of_split_places(meshes: dict) -> None:
    image, chosen = parameter(random.Random(2), N, C, H, W), places(N, 2, H, W)
    for mesh in meshes.values():
        taken = torch.take_along_dim(image, shard(chosen, mesh), 1)
        assert torch.equal(taken.full_tensor(), torch.take_along_dim(image, chosen, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.take_along_dim(x, places(5)),
        lambda x: x.take_along_dim(indices=places(5), dim=None),
        lambda x: torch.take_along_dim(x, places(N, C, 1, W), 2),
        lambda x: torch.take_along_dim(x, places(N, 1, 1, W), 1),
    ],
)
def test_over_pixels_it_is_refused_by_name(call: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        call(torch.rand(N, C, H, W))
        with pytest.raises(UnsupportedSpatialOp, match="take_along_dim is not supported"):
            call(shard(torch.rand(N, C, H, W), mesh))
