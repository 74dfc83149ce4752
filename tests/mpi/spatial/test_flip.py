"""Images turned round, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, check_in, close, draw, seeds

TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip rows": lambda x: x.flip(2),
    "flip columns": lambda x: torch.flip(x, [-1]),
    "flip all": lambda x: torch.flip(x, dims=(0, 1, 2, 3)),
    "flip samples": lambda x: x.flip((0,)),
    "flip nothing": lambda x: x.flip(()),
    "fliplr": torch.fliplr,
    "flipud": lambda x: x.flipud(),
    "roll rows": lambda x: x.roll(3, 2),
    "roll both": lambda x: torch.roll(x, shifts=(-2, 5), dims=(2, 3)),
    "roll far": lambda x: torch.roll(x, (1, 57, -31), (1, -1, -2)),
    "roll by nothing": lambda x: x.roll(0, 2),
    "roll samples": lambda x: x.roll(1, 0),
    "roll of a shifted window": lambda x: x.permute(0, 2, 3, 1).roll((-2, -1), (1, 2)),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "rot90 twice": lambda x: torch.rot90(x, 2, (2, 3)),
    "rot90 backwards": lambda x: torch.rot90(x, -1, (-2, -1)),
    "rot90 the other way": lambda x: torch.rot90(x, 1, (3, 2)),
    "rot90 not at all": lambda x: torch.rot90(x, 4, (2, 3)),
    "rot90 of channels and rows": lambda x: torch.rot90(x, 1, (1, 2)),
}


@pytest.mark.parametrize("seed", seeds(6, 40))
@pytest.mark.parametrize("name", TURNS)
def test_turn(name: str, seed: int, meshes: dict) -> None:
    s = draw(random.Random(seed), meshes)
    check(TURNS[name], s.image, [], s.mesh, f"{s}, {name}")


@pytest.mark.parametrize("name", TURNS)
def test_turn_labels(name: str, meshes: dict) -> None:
    whole = torch.arange(2 * 3 * 9 * 7).view(2, 3, 9, 7)
    for mesh in meshes.values():
        close(TURNS[name](shard(whole, mesh)).full_tensor(), TURNS[name](whole), name)


def test_a_turned_image_may_be_written_to(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.ones(1, 2, 8, 6), mesh)
        for turn in TURNS.values():
            y = turn(x)
            y.mul_(3)
            assert bool(torch.all(x.full_tensor() == 1))


def test_roll_without_dims_and_of_tokens_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 2, 8, 6), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="pass dims"):
            x.roll(2)
        with pytest.raises(UnsupportedSpatialOp, match="separate dims"):
            x.flatten(2).roll(1, 2)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    for count in range(1, 1 + dims):
        for over in combinations(range(2, 2 + dims), count):
            check_in(dims, lambda x, o=over: x.flip(o), f"flip {over}")
            shifts = (2, -3, 1)[:count]
            check_in(dims, lambda x, s=shifts, o=over: torch.roll(x, s, o), f"roll {over}")
    for plane in combinations(range(2, 2 + dims), 2):
        for turns in (1, 2, 3):
            check_in(dims, lambda x, k=turns, p=plane: x.rot90(k, p), f"rot90 {turns} {plane}")
