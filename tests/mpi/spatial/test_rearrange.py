"""Pixels moved along rows and columns, and between them and channels, against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import shard
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    close,
    draw,
    every_mesh,
    parameter,
    seeds,
)

TURNS: dict[str, Operation] = {
    "flip rows": lambda x: x.flip(2),
    "flip columns": lambda x: torch.flip(x, [-1]),
    "flip all": lambda x: torch.flip(x, dims=(0, 1, 2, 3)),
    "fliplr": torch.fliplr,
    "roll far": lambda x: torch.roll(x, (1, 57, -31), (1, -1, -2)),
    "roll of a shifted window": lambda x: x.permute(0, 2, 3, 1).roll((-2, -1), (1, 2)),
    "rot90 twice": lambda x: torch.rot90(x, 2, (2, 3)),
    "rot90 the other way": lambda x: torch.rot90(x, 1, (3, 2)),
    "rot90 not at all": lambda x: torch.rot90(x, 4, (2, 3)),
    "rot90 of channels and rows": lambda x: torch.rot90(x, 1, (1, 2)),
}


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(1, 40))
@pytest.mark.parametrize("name", TURNS)
def test_turn(name: str, seed: int, meshes: dict) -> None:
    s = draw(random.Random(seed), meshes)
    check(TURNS[name], s.image, [], s.mesh, f"{s}, {name}")


def test_a_turned_image_may_be_written_to(meshes: dict) -> None:
    """Of labels, too."""
    whole = torch.arange(1 * 3 * 9 * 7).view(1, 3, 9, 7)
    for mesh in meshes.values():
        x = shard(whole, mesh)
        for name, turn in TURNS.items():
            y = turn(x)
            close(y.full_tensor(), turn(whole), name)
            y.mul_(3)
            assert torch.equal(x.full_tensor(), whole)


# --- pixels that become channels, and back


@pytest.mark.tiles
@pytest.mark.parametrize("seed", seeds(4, 100))
def test_pixel_shuffle_and_unshuffle(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    factor = 1 + (seed + 1) % 4
    both = nn.Sequential(nn.PixelShuffle(factor), nn.PixelUnshuffle(factor))
    height, width = (factor * rng.randint(-(-4 // factor), 9) for _ in range(2))
    image = parameter(rng, 2, 2 * factor * factor, height, width)
    if seed % 2:
        image = image.contiguous(memory_format=torch.channels_last)
    for turn in (lambda x: F.pixel_unshuffle(x, factor), both):
        check(turn, image, [], meshes, f"{tuple(image.shape)} by {factor}")


def squeeze(x: Tensor) -> Tensor:
    """Down to less pixels than ranks."""
    return F.pixel_shuffle(F.pixel_unshuffle(x, 4).sin(), 4)


SHUFFLED: dict[str, tuple[Operation, tuple[int, ...]]] = {
    "down to a pixel": (squeeze, (1, 1, 4, 4)),
    "down to a row": (squeeze, (1, 1, 4, 12)),
    **{f"channels in {n}": (nn.ChannelShuffle(n), (2, 6, 5, 7)) for n in (1, 2, 3, 6)},
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffled(name: str) -> None:
    operation, size = SHUFFLED[name]
    check_keyed(operation, size, [], every_mesh(len(size) - 2), name)


# --- any map of rows and columns
