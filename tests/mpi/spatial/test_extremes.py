"""Extremes of what is no ordinary number: of whole numbers, truths, infinities and NaN."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import SpatialTensor, shard
from tests.mpi.equality import Operation, check, close, parameter, same

OVER: dict[str, Operation] = {
    "amin of rows": lambda x: x.amin(2),
    "amin of columns": lambda x: torch.amin(x, 3, keepdim=True),
    "amin of all": lambda x: x.amin((0, 1, 2, 3)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "smallest of aminmax": lambda x: torch.aminmax(x, dim=2)[0],
    "largest of aminmax": lambda x: torch.aminmax(x, dim=2)[1],
    "values of min": lambda x: x.min(3)[0],
    "places of min": lambda x: x.min(3)[1],
    "values of max": lambda x: torch.max(x, 2)[0],
    "places of max": lambda x: torch.max(x, 2)[1],
    "argmin of all": lambda x: x.argmin(),
    "argmax of columns": lambda x: x.argmax(3, True),
}
NOT_OF_TRUTHS = {"argmin of all", "argmax of columns"}


def image(seed: int, *size: int) -> Tensor:
    return parameter(random.Random(seed), 2, 3, *size)


def few(x: Tensor) -> Tensor:
    """Fewer pixels than ranks: some have none."""
    return F.max_pool2d(x, 4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
@pytest.mark.parametrize("name", OVER)
def test_whole_numbers_and_truths(name: str, dtype: torch.dtype, meshes: dict) -> None:
    if dtype == torch.bool and name in NOT_OF_TRUTHS:
        pytest.skip("PyTorch has none")

    def coded(x: Tensor) -> Tensor:
        return x > 0.2 if dtype == torch.bool else (30 + 10 * x).to(dtype)

    same(lambda x: OVER[name](coded(x)), image(5, 9, 8), meshes, name)
    same(lambda x: OVER[name](coded(few(x))), image(5, 9, 8), meshes, f"{name}, few pixels")


@pytest.mark.parametrize("name", OVER)
def test_not_a_number_is_the_extreme_and_the_first_one_is_its_place(
    name: str, meshes: dict
) -> None:
    whole = image(5, 9, 8)
    whole[0, 1, 2, 3] = whole[0, 1, 7, 3] = whole[1, 0, 8, 0] = whole[1, 0, 8, 7] = torch.nan
    same(OVER[name], whole, meshes, name)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinities_beside_an_extreme_leave_it_alone(sign: int, meshes: dict) -> None:
    def extremes(x: Tensor) -> Tensor:
        far = x.masked_fill(x < 0.3, -torch.inf) * sign
        places = [far.max(2)[0].sum(1), far.min(2)[0].sum(1)]
        return places[0 if sign > 0 else 1].clamp(-99, 99)

    for mesh in meshes.values():
        check(extremes, image(7, 9, 8), [], mesh, f"on {mesh.grid} ")


def test_with_a_second_tensor_they_are_pairwise(meshes: dict) -> None:
    one, other = image(1, 9, 8), image(2, 9, 8)
    calls = (torch.max, torch.min, Tensor.max, Tensor.min)
    for mesh in meshes.values():
        for call in calls:
            for ours in (
                call(shard(one, mesh), shard(other, mesh)),
                call(shard(one, mesh), other=other),
            ):
                assert isinstance(ours, SpatialTensor)
                close(ours.full_tensor(), call(one, other), f"{call} on {mesh.grid} ")
