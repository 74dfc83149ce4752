"""What all operations with a window take and refuse."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from spatialdl import shard
from tests.mpi.equality import Operation, check, parameter

LARGE: dict[str, Operation] = {
    "conv2d in rows": lambda x: F.conv2d(x, x.new_ones(2, 3, 9, 1)),
    "conv2d in columns": lambda x: F.conv2d(x, x.new_ones(2, 3, 1, 8)),
    "conv2d, dilated": lambda x: F.conv2d(x, x.new_ones(2, 3, 3, 3), dilation=(1, 4)),
    "max_pool2d": lambda x: F.max_pool2d(x, (1, 8)),
    "avg_pool2d": lambda x: F.avg_pool2d(x, (9, 1)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_window_larger_than_the_image_in_one_dim_is_refused(name: str, meshes: dict) -> None:
    image = torch.rand(2, 3, 8, 7)
    with pytest.raises(RuntimeError):
        LARGE[name](image)
    for mesh in meshes.values():
        with pytest.raises(ValueError, match="window is larger than the image"):
            LARGE[name](shard(image, mesh))


ONE_NUMBER: dict[str, Operation] = {
    "conv2d": lambda x: F.conv2d(x, x.new_ones(2, 3, 3, 2), None, (2,), [1], (2,)),
    "max_pool2d": lambda x: F.max_pool2d(x, [3], (2,), (1,)),
    "avg_pool2d": lambda x: F.avg_pool2d(x, (3,), [2]),
}


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_a_list_of_one_number_is_for_rows_and_columns(name: str, meshes: dict) -> None:
    for mesh in meshes.values():
        image = parameter(random.Random(3), 2, 3, 9, 11)
        check(ONE_NUMBER[name], image, [], mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("kernel", [1, 3])
def test_autocast_leaves_float64_as_it_is(kernel: int, meshes: dict) -> None:
    rng = random.Random(3)
    weights = [parameter(rng, 4, 3, kernel, kernel), parameter(rng, 4)]
    for mesh in meshes.values():
        with torch.autocast("cpu", torch.bfloat16):
            check(F.conv2d, parameter(rng, 2, 3, 9, 11), weights, mesh, f"on {mesh.grid} ")
