"""Softmax of a split image against one process in float64: values and gradients."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import shard
from tests.mpi.equality import Operation, check, check_in, parameter

KINDS: dict[str, Operation] = {
    "torch.softmax": torch.softmax,
    "Tensor.softmax": Tensor.softmax,
    "F.softmax": F.softmax,
    "torch.log_softmax": torch.log_softmax,
    "Tensor.log_softmax": lambda x, dim: x.log_softmax(dim=dim),
    "F.log_softmax": lambda x, dim: F.log_softmax(x, dim=dim),
    "F.softmin": F.softmin,
    "in another type": lambda x, dim: F.softmax(x, dim, dtype=torch.float64),
    "of large ones": lambda x, dim: F.softmax(1000 * x, dim),
    "log of large ones": lambda x, dim: F.log_softmax(1000 * x, dim),
    "masked": lambda x, dim: F.softmax(
        x.masked_fill(x == x.amax(dim, keepdim=True), float("-inf")), dim
    ),
}


def image(*shape: int) -> Tensor:
    return parameter(random.Random(1), *shape)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("name", KINDS)
def test_softmax(name: str, dim: int, meshes: dict) -> None:
    operation = KINDS[name]
    for mesh in meshes.values():
        what = f"{name} over {dim} on {mesh.grid}"
        check(lambda x: operation(x, dim), image(2, 3, 11, 7), [], mesh, what)
        few = image(2, 3, 9, 8)
        check(lambda x: operation(F.max_pool2d(x, 4), dim), few, [], mesh, f"{what}, few pixels")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_maps(dim: int, meshes: dict) -> None:
    """(N, H, W)"""
    for mesh in meshes.values():
        check(lambda x: x.softmax(dim), image(3, 7, 5), [], mesh, f"over {dim} on {mesh.grid}")


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_of_tokens(dim: int, meshes: dict) -> None:
    """Rows and columns merged: (N, H*W, C)."""

    def operation(x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return tokens.softmax(dim) + tokens.log_softmax(dim)

    for mesh in meshes.values():
        check(operation, image(2, 3, 7, 5), [], mesh, f"over {dim} on {mesh.grid}")


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_of_channels_at_the_end(dim: int, meshes: dict) -> None:
    for mesh in meshes.values():
        check(
            lambda x: x.permute(0, 2, 3, 1).softmax(dim),
            image(2, 3, 7, 5),
            [],
            mesh,
            f"over {dim} on {mesh.grid}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_types(dim: int, dtype: torch.dtype, meshes: dict) -> None:
    whole = image(2, 3, 11, 7)
    expected = whole.to(dtype).double().softmax(dim)
    for mesh in meshes.values():
        ours = shard(whole.to(dtype), mesh).softmax(dim)
        assert ours.dtype == dtype
        near = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.full_tensor().double(), expected, rtol=near, atol=near)


def test_what_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(IndexError):
            shard(image(2, 3, 6, 6), mesh).softmax(4)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    for dim in range(2 + dims):
        check_in(dims, lambda x, d=dim: F.softmax(x, d) + F.log_softmax(x, d), f"over {dim}")
    check_in(dims, lambda x: x.flatten(2).softmax(-1), "over all")
