"""Operands of which only the second is split, or only the second has the full size."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torch import Tensor

from spatialdl import SpatialTensor, shard
from tests.mpi.equality import close, parameter

Pair = Callable[[Tensor, Tensor], Tensor]
PLAIN_FIRST: dict[str, Pair] = {
    "and": lambda a, b: (a > 0) & (b > 0),
    "or": lambda a, b: (a > 0) | (b > 0),
    "xor": lambda a, b: (a > 0) ^ (b > 0),
    "shift": lambda a, b: (10 * a.abs()).int() << (2 * b.abs()).int(),
    "power": lambda a, b: a.abs() ** b,
    "minus": lambda a, b: a - b,
    "remainder": lambda a, b: a % b,
    "less": lambda a, b: a < b,
}


@pytest.mark.parametrize("name", PLAIN_FIRST)
def test_a_whole_tensor_may_stand_before_a_split_one(name: str, meshes: dict) -> None:
    rng = random.Random(2)
    one, other = parameter(rng, 2, 3, 9, 7), parameter(rng, 2, 3, 9, 7)
    for mesh in meshes.values():
        for first in (one, one[:, :, :1], one[0, 0, 0, 0].view(1, 1, 1)):
            ours = PLAIN_FIRST[name](first, shard(other, mesh))
            assert isinstance(ours, SpatialTensor)
            close(ours.full_tensor(), PLAIN_FIRST[name](first, other), f"{name} {mesh.grid} ")


@pytest.mark.parametrize("dim", [2, 3])
def test_one_split_row_or_column_beside_a_split_image(dim: int, meshes: dict) -> None:
    rng = random.Random(3)
    image, line = parameter(rng, 2, 3, 9, 7), parameter(rng, 2, 3, 9, 7).narrow(dim, 2, 1)
    for mesh in meshes.values():
        if mesh.grid[dim - 2] > 1:
            continue  # one row cannot be shared out among several rows of ranks
        for pair in ((line, image), (image, line)):
            plain = [x.clone().requires_grad_() for x in pair]
            ours = [x.clone().requires_grad_() for x in pair]
            expected = plain[0] / plain[1].exp()
            found = shard(ours[0], mesh) / shard(ours[1], mesh).exp()
            assert found.shape == expected.shape
            close(found.full_tensor(), expected, f"on {mesh.grid} ")
            (found * image).sum().backward()
            (expected * image).sum().backward()
            for one, other in zip(ours, plain, strict=True):
                close(one.grad, other.grad, f"gradient on {mesh.grid} ")
