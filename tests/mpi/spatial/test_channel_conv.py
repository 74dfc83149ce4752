"""Convolutions of one pixel on tokens and on windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, parameter

IMAGES = {"odd": (9, 7), "as small as the grid": (6, 6)}


def on_tokens(groups: int) -> Callable[..., Tensor]:
    return lambda x, weight, bias: F.conv1d(x.flatten(2), weight[:, :, 0], bias, groups=groups)


def on_windows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As MobileViTV2 has them: (N, C, pixels of a patch, patches)."""
    patches = F.unfold(x, 1).unflatten(1, (4, 1))
    return F.conv2d(patches, weight, bias, padding="same")


def where_ranks_have_no_pixels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    small = F.max_pool2d(x, 3)
    return F.conv1d(small.flatten(2), weight[:, :, 0], bias)


CASES = {
    "tokens": (on_tokens(1), (6, 4, 1, 1)),
    "tokens, groups": (on_tokens(2), (6, 2, 1, 1)),
    "windows": (on_windows, (6, 4, 1, 1)),
    "ranks without pixels": (where_ranks_have_no_pixels, (6, 4, 1, 1)),
}


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("name", CASES)
def test_channels_are_mixed_where_they_are(name: str, size: str, meshes: dict) -> None:
    operation, shape = CASES[name]
    weight, bias = parameter(random.Random(1), *shape), parameter(random.Random(2), shape[0])
    for mesh in meshes.values():
        image = parameter(random.Random(3), 2, 4, *IMAGES[size])
        check(operation, image, [weight, bias], mesh, f"{name} on {mesh.grid}")


def test_longer_kernels_and_split_channels_are_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(2, 4, 9, 7, dtype=torch.float64), mesh)
        with pytest.raises(UnsupportedSpatialOp, match=r"conv1d .* supported: use conv2d"):
            F.conv1d(x.flatten(2), torch.rand(6, 4, 3, dtype=torch.float64))
        with pytest.raises(UnsupportedSpatialOp, match=r"conv2d .*channels\) must not be split"):
            F.conv2d(x.permute(0, 2, 3, 1), torch.rand(6, 9, 1, 1, dtype=torch.float64))


def test_a_weight_for_other_channels_is_refused_on_every_rank(meshes: dict) -> None:
    for mesh in meshes.values():
        tokens = shard(torch.rand(2, 4, 9, 7), mesh).flatten(2)
        with pytest.raises(ValueError, match=r"conv1d: the image has 4 channels"):
            F.conv1d(tokens, torch.rand(6, 3, 1))


def test_autocast_gives_one_type_also_where_ranks_have_no_pixels(meshes: dict) -> None:
    weight, bias = torch.rand(6, 4, 1, 1), torch.rand(6)
    for mesh in meshes.values():
        image = shard(torch.rand(2, 4, 6, 6), mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = where_ranks_have_no_pixels(image, weight, bias)
        types = mesh.comm.allgather(y.to_local().dtype)
        assert set(types) == {torch.bfloat16}
