"""Joining split images, with each other and with whole ones, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import check, check_in, close, parameter, seeds

JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "channels": lambda x, w: torch.cat([x, x.sin()], 1),
    "channels, negative dim": lambda x, w: torch.concat((x, x * 2, x), dim=-3),
    "samples": lambda x, w: torch.concatenate([x, x.cos()]),
    "with a whole": lambda x, w: torch.cat([x, w], 1),
    "a whole first": lambda x, w: torch.cat([w, x, w.sin()], axis=1),
    "with nothing": lambda x, w: torch.cat([torch.empty(0, dtype=x.dtype), x * w, x], 1),
    "another layout": lambda x, w: torch.cat([x, x[:, :, 2:].sin(), x[..., :-2, :]][1:], 1),
    "rows": lambda x, w: torch.cat([x, x.sin()], 2),
    "columns with a whole": lambda x, w: torch.cat([w, x, w[..., :3]], -1),
    "rows of other sizes": lambda x, w: torch.cat([x[:, :, 3:].sin(), x, x[:, :, :1]], 2),
    "NHWC": lambda x, w: torch.cat([x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1)], -1),
    "rows of NHWC": lambda x, w: torch.cat([x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1)], 1),
    "tokens": lambda x, w: torch.cat([x.flatten(2), w.flatten(2).sin()], 1),
    "stack": lambda x, w: torch.stack([x, x.sin()]),
    "stack with a whole": lambda x, w: torch.stack([x, w], 2),
    "stack at the end": lambda x, w: torch.stack((x, x * 2), dim=-1),
    "stack between": lambda x, w: torch.stack((x, x.sin(), w), 3),
    "hstack": lambda x, w: torch.hstack([x, w]),
    "vstack": lambda x, w: torch.vstack([x, w]),
    "dstack": lambda x, w: torch.dstack([x, w]),
    "one alone": lambda x, w: torch.cat([x * w], 1),
}


@pytest.mark.parametrize("seed", seeds(3, 20))
@pytest.mark.parametrize("name", JOINS)
def test_join(name: str, seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    for mesh in meshes.values():
        shape = 2, 3, rng.randint(5, 12), rng.randint(4, 12)
        image, whole = parameter(rng, *shape), parameter(rng, *shape)

        def join(x: Tensor, whole: Tensor) -> Tensor:
            return JOINS[name](x, whole) + whole.sum()

        check(join, image, [whole], mesh, f"{name} of {shape} on {mesh.grid}")


def test_an_upsampled_map_meets_its_skip(meshes: dict) -> None:
    """Ronneberger et al. (2015), U-Net, with an odd size."""

    def unet(x: Tensor, weight: Tensor) -> Tensor:
        low = F.max_pool2d(F.conv2d(x, weight, None, 1, 1), 2)
        up = F.interpolate(low.sin(), scale_factor=2, mode="bilinear")
        rows, cols = (x.shape[dim] - up.shape[dim] for dim in (2, 3))
        return torch.cat([x, F.pad(up, (0, cols, 0, rows))], 1)

    rng = random.Random(0)
    for mesh in meshes.values():
        image, weight = parameter(rng, 2, 3, 13, 11), parameter(rng, 3, 3, 3, 3)
        check(unet, image, [weight], mesh, f"on {mesh.grid}")


def test_types_are_promoted_and_labels_joined(meshes: dict) -> None:
    labels = torch.arange(2 * 3 * 7 * 5).view(2, 3, 7, 5)
    for mesh in meshes.values():
        x, y = shard(labels, mesh), shard(labels.to(torch.float32), mesh)
        for dim in range(4):
            joined = torch.cat([x, y], dim)
            assert joined.dtype == torch.float32
            close(joined.full_tensor(), torch.cat([labels, labels.float()], dim), f"{dim}")


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda x: torch.cat([x.flatten(2), x.flatten(2)], 2), "whole tensors only"),
        (lambda x: torch.cat([x, x.permute(0, 1, 3, 2)], 1), "same dims"),
        (lambda x: torch.cat([x, x], 1, out=torch.empty(1, 8, 6, 6)), "arguments"),
    ],
)
def test_refused(call: Callable[[Tensor], Tensor], advice: str, meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match=advice):
            call(shard(torch.zeros(1, 4, 6, 6), mesh))


def test_sizes_that_do_not_fit(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.zeros(1, 4, 6, 6), mesh)
        for call in (lambda x: torch.cat([x, x[..., 1:]], 1), lambda x: torch.stack([x, x[:, 1:]])):
            with pytest.raises(RuntimeError):
                call(x)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    for dim in range(2 + dims):
        check_in(dims, lambda x, d=dim: torch.cat([x, 2 * x.relu()], d), f"cat {dim}")
    for dim in range(3 + dims):
        check_in(dims, lambda x, d=dim: torch.stack([x, x.exp()], d), f"stack {dim}")
