"""Index tensors along split dims against one process: rows, columns, tokens, computed windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spatialdl import Mesh, UnsupportedSpatialOp, init_mesh, shard
from spatialdl.comm.communicator import Communicator
from spatialdl.spatial.picking import blocks
from tests.mpi.device import DEVICE
from tests.mpi.equality import check, every_mesh, parameter, same

N, C, H, W = 2, 3, 7, 5
Meshes = dict[tuple[int, int], Mesh]


def near(size: int, kernel: int = 3) -> Tensor:
    """For each place the indices of its window, which lies within the image."""
    first = (torch.arange(size) - kernel // 2).clamp(0, size - kernel)
    return first[:, None] + torch.arange(kernel)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def of_tokens(x: Tensor) -> Tensor:
    """The neighbours of each token, of which the first windows of `near` are not in order."""
    rows, columns = near(H), near(W)
    index = (rows[:, None, :, None] * W + columns[None, :, None, :]).view(H * W, 9)
    return tokens(x)[:, index]


ROWS, COLUMNS = torch.tensor([6, 0, 0, -1, 3, 2]), torch.tensor([4, 1])
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, :, ROWS],
    "columns": lambda x: x[..., COLUMNS],
    "columns in a list": lambda x: x[..., [3, 0, 3]],
    "one row, kept": lambda x: x[:, :, [4]],
    "as many rows": lambda x: x[:, :, torch.arange(H).flip(0)],
    "rows of channels-last maps": lambda x: x.permute(0, 2, 3, 1)[:, ROWS],
    "rows, then columns": lambda x: x[:, :, ROWS][..., COLUMNS],
    "both at once": lambda x: x[..., ROWS[:, None], COLUMNS],
    "index_select": lambda x: torch.index_select(x, 2, ROWS.abs()),
    "windows of rows": lambda x: x[:, :, near(H)].sin(),
    "windows of columns": lambda x: x[..., near(W)],
    "windows": lambda x: x[..., near(H)[:, :, None, None], near(W)].square(),
    "neighbours of tokens": of_tokens,
    "tokens in another order": lambda x: tokens(x)[:, torch.arange(H * W).flip(0)],
    "more rows than there are": lambda x: x[:, :, torch.arange(3 * H) % H],
}


@pytest.mark.parametrize("name", CASES)
def test_picked(name: str, meshes: Meshes) -> None:
    image = parameter(random.Random(1), N, C, H, W)
    for mesh in meshes.values():
        check(CASES[name], image, [], mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    image = parameter(random.Random(1), N, C, *(6, 5, 7)[:dims])
    for mesh in every_mesh(dims).values():
        check(lambda x: x[:, :, near(6)], image, [], mesh, f"windows on {mesh.grid} ")
        check(lambda x: x[..., [0, 4, 1]], image, [], mesh, f"a list on {mesh.grid} ")


def test_of_whole_numbers(meshes: Meshes) -> None:
    labels = torch.arange(N * H * W).view(N, H, W)
    same(lambda x: x[:, ROWS], labels, meshes, "labels ")
    same(lambda x: (x % 3 == 0)[..., near(W)], labels, meshes, "truths ")


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "pairs of rows and columns": lambda x: x[:, :, torch.arange(W), torch.arange(W)],
    "rows and samples": lambda x: x[torch.tensor([0, 1])[:, None], :, ROWS],
    "with a slice": lambda x: x[:, 1:, ROWS],
    "some of the tokens": lambda x: tokens(x)[:, ROWS],
    "a mask of bytes": lambda x: x[:, :, (torch.arange(H) > 3).to(torch.uint8)],
    "a mask of rows": lambda x: x[:, :, torch.arange(H) > 3],
    "beside class tokens": lambda x: torch.cat([torch.zeros(N, 1, C, device=DEVICE), tokens(x)], 1)[
        :, torch.arange(H * W + 1)
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, meshes: Meshes) -> None:
    for mesh in meshes.values():
        if mesh.grid_comm.size > 1:
            with pytest.raises(UnsupportedSpatialOp, match="index"):
                REFUSED[name](shard(torch.rand(N, C, H, W).to(DEVICE), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, :, torch.tensor([0, H])],
        lambda x: x[..., torch.tensor([-1 - W, 1])],
        lambda x: torch.index_select(x, 2, torch.tensor([-1])),
    ],
)
def test_no_such_pixel(call: Callable[[Tensor], Tensor], meshes: Meshes) -> None:
    """All ranks raise: one that goes on would wait for the others in the next exchange."""
    for mesh in meshes.values():
        for image in (torch.rand(N, C, H, W), shard(torch.rand(N, C, H, W), mesh)):
            with pytest.raises(IndexError):
                call(image)


def test_ranks_with_other_indices_are_noticed(world: Communicator) -> None:
    mesh = init_mesh((world.size, 1))
    if world.size > 1:
        x = shard(torch.rand(N, C, H, W, generator=torch.Generator().manual_seed(0)), mesh)
        with pytest.raises(ValueError, match="tensor beside a split image"):
            x[:, :, torch.tensor([mesh.part, 0])]


def test_indices_of_one_dim_each() -> None:
    assert blocks([(7, 3, 1, 1), (5, 3)]) == [(7, 3), (5, 3)]
    assert blocks([(6, 1), (2,)]) == [(6,), (2,)]
    assert blocks([(4, 2)]) == [(4, 2)]
    assert blocks([(5,), (5,)]) is None
    assert blocks([(5,), (6, 1)]) is None
