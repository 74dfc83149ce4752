"""Operands of which only the second is split, or only the second has the full size."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spatialdl import SpatialTensor, UnsupportedSpatialOp, shard
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


def test_what_is_split_within_windows_says_to_gather_it(meshes: dict) -> None:
    """Queries of a small map beside windows of a large one, as networks of global queries do."""
    small, large = (torch.randn(1, 2, side, side, dtype=torch.float64) for side in (7, 28))

    def added(x: Tensor, queries: Tensor, gathers: bool) -> Tensor:
        windows = queries.permute(0, 2, 3, 1).repeat_interleave(16, 0).view(1, 4, 4, 7, 7, 2)
        image = windows.permute(0, 1, 3, 2, 4, 5).reshape(1, 28, 28, 2)
        return x.permute(0, 2, 3, 1) + (image.full_tensor() if gathers else image)

    for mesh in meshes.values():
        x, queries = shard(large, mesh), shard(small, mesh)
        with pytest.raises(
            UnsupportedSpatialOp, match=r"^add .* over 28x28.* 7x7.*call full_tensor"
        ):
            added(x, queries, gathers=False)
        ours = added(x, queries, gathers=True).full_tensor()
        assert torch.equal(ours, added(large, small, gathers=False))
