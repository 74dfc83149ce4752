"""Pixels that become channels, and back, against one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, close, every_mesh, parameter, seeds


@pytest.mark.parametrize("seed", seeds(12, 100))
def test_pixel_shuffle_and_unshuffle(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    factor = rng.choice((1, 2, 3, 4))
    for grid, mesh in meshes.items():
        height, width = (factor * rng.randint(max(1, -(-n // factor)), 9) for n in grid)
        image = parameter(rng, 2, 2 * factor * factor, height, width)
        if rng.random() < 0.5:
            image = image.contiguous(memory_format=torch.channels_last)
        what = f"{tuple(image.shape)} by {factor} on {grid}"
        check(lambda x: F.pixel_shuffle(x, factor), image, [], mesh, what)
        check(lambda x: F.pixel_unshuffle(x, factor), image, [], mesh, what)
        check(
            lambda x: nn.PixelUnshuffle(factor)(nn.PixelShuffle(factor)(x)), image, [], mesh, what
        )


def test_down_to_less_pixels_than_ranks(meshes: dict) -> None:
    def squeeze(x: Tensor) -> Tensor:
        return F.pixel_shuffle(F.pixel_unshuffle(x, 4).sin(), 4)

    rng = random.Random(0)
    for mesh in meshes.values():
        check(squeeze, parameter(rng, 1, 1, 4, 4), [], mesh, f"on {mesh.grid}")
        check(squeeze, parameter(rng, 1, 1, 4, 12), [], mesh, f"on {mesh.grid}")


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_channel_shuffle(groups: int, meshes: dict) -> None:
    rng = random.Random(0)
    for mesh in meshes.values():
        image = parameter(rng, 2, 6, 5, 7)
        check(lambda x: F.channel_shuffle(x, groups), image, [], mesh, f"{groups} on {mesh.grid}")
        check(nn.ChannelShuffle(groups), image, [], mesh, f"{groups} on {mesh.grid}")


def test_labels(meshes: dict) -> None:
    whole = torch.arange(2 * 4 * 6 * 8).view(2, 4, 6, 8)
    for mesh in meshes.values():
        x = shard(whole, mesh)
        close(F.pixel_unshuffle(x, 2).full_tensor(), F.pixel_unshuffle(whole, 2), "unshuffle")
        close(F.pixel_shuffle(x, 2).full_tensor(), F.pixel_shuffle(whole, 2), "shuffle")
        close(F.channel_shuffle(x, 2).full_tensor(), F.channel_shuffle(whole, 2), "channels")


def test_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 4, 6, 8), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="rows and columns last"):
            F.pixel_shuffle(x.permute(0, 2, 3, 1), 2)
        with pytest.raises(UnsupportedSpatialOp, match="dim 1"):
            F.channel_shuffle(x.permute(0, 2, 3, 1), 2)
        for wrong in (lambda x: F.pixel_shuffle(x, 3), lambda x: F.pixel_unshuffle(x, 4)):
            with pytest.raises((RuntimeError, AssertionError)):  # by PyTorch's version
                wrong(x)


def test_blocks_of_voxels_by_views() -> None:
    """As `rearrange` of einops moves blocks of 2 voxels into channels, and back."""

    def unshuffled(x: Tensor) -> Tensor:
        n, c, d, h, w = x.shape
        blocks = x.reshape(n, c, d // 2, 2, h // 2, 2, w // 2, 2)
        return blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(n, 8 * c, d // 2, h // 2, w // 2)

    def shuffled(x: Tensor) -> Tensor:
        n, c, d, h, w = x.shape
        blocks = x.reshape(n, c // 8, 2, 2, 2, d, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return blocks.reshape(n, c // 8, 2 * d, 2 * h, 2 * w)

    rng = random.Random(5)
    for mesh in every_mesh(3).values():
        check(unshuffled, parameter(rng, 2, 3, 6, 8, 12), [], mesh, f"unshuffle on {mesh.grid}")
        check(shuffled, parameter(rng, 2, 16, 7, 6, 9), [], mesh, f"shuffle on {mesh.grid}")
