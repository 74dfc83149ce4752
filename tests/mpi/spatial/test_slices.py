"""Slicing by other names against one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, check_in, parameter

PARTS: dict[str, Callable[[Tensor], Any]] = {
    "narrow rows": lambda x: x.narrow(2, 2, 5),
    "narrow columns": lambda x: torch.narrow(x, -1, -4, 3),
    "narrow channels": lambda x: x.narrow(1, 1, 2),
    "select channel": lambda x: x.select(1, -1),
    "select row": lambda x: torch.select(x, 2, 4),
    "unbind": lambda x: x.unbind(1),
    "iterate": list,
    "split": lambda x: torch.split(x, 2, 1),
    "split by sizes": lambda x: x.split([1, 3], dim=1),
    "split rows": lambda x: x.split(4, 2),
    "split_with_sizes": lambda x: x.split_with_sizes([3, 8], -1),
    "chunk": lambda x: x.chunk(2, 1),
    "chunk columns": lambda x: torch.chunk(x, 3, -1),
    "tensor_split": lambda x: x.tensor_split(3, 1),
    "tensor_split rows": lambda x: torch.tensor_split(x, (2, 5), 2),
    "hsplit": lambda x: x.hsplit(2),
    "vsplit": lambda x: torch.vsplit(x, [1]),
    "dsplit": lambda x: x.dsplit(3),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2])),
    "index_select of columns": lambda x: x.index_select(3, torch.tensor([2, 0, 2])),
    "diff": lambda x: x.diff(),
    "diff of rows": lambda x: torch.diff(x, n=2, dim=-2),
    "diff of channels": lambda x: x.diff(dim=1),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_part(name: str, meshes: dict) -> None:
    rng = random.Random(0)
    image = parameter(rng, 2, 4, 9, 11)
    parts = PARTS[name](image)
    count = 1 if isinstance(parts, Tensor) else len(parts)
    for mesh in meshes.values():
        for number in range(count):

            def one(x: Tensor, number: int = number) -> Tensor:
                result = PARTS[name](x)
                return result if isinstance(result, Tensor) else result[number]

            check(one, image, [], mesh, f"{name} {number} on {mesh.grid}")


def test_tokens_are_sliced_along_their_other_dims(meshes: dict) -> None:
    def queries(x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k = tokens.chunk(2, -1)
        return q * k.sin()

    rng = random.Random(0)
    for mesh in meshes.values():
        check(queries, parameter(rng, 2, 4, 7, 5), [], mesh, f"tokens on {mesh.grid}")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.unbind(2),
        lambda x: x.flatten(2).index_select(2, torch.tensor([1])),
        lambda x: x.flatten(2)[:, :, 3:],
        lambda x: x.flatten(2).narrow(2, 0, 5),
    ],
)
def test_refused(call: Callable[[Tensor], Any], meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match="9x11"):
            call(shard(torch.zeros(2, 4, 9, 11), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.narrow(2, 5, 9),
        lambda x: x.split([1, 1], 1),
        lambda x: x.chunk(0, 1),
        lambda x: x.select(1, 4),
        lambda x: x.index_select(7, torch.tensor([1])),
    ],
)
def test_what_pytorch_refuses(call: Callable[[Tensor], Any], meshes: dict) -> None:
    image = torch.zeros(2, 4, 9, 11)
    for mesh in meshes.values():
        for x in (image, shard(image, mesh)):
            with pytest.raises((RuntimeError, IndexError)):
                call(x)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    for dim in range(1, 2 + dims):
        check_in(dims, lambda x, d=dim: x.chunk(2, d)[1] * 2, f"chunk {dim}")
        check_in(dims, lambda x, d=dim: x.split((1, x.shape[d] - 1), d)[1], f"split {dim}")
        check_in(dims, lambda x, d=dim: x.narrow(d, 1, 3).square(), f"narrow {dim}")
        check_in(dims, lambda x, d=dim: x.select(d, 2).exp(), f"select {dim}")
