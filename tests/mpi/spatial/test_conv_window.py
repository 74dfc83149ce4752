"""Convolution where ranks have no pixels, and what it keeps for backward."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import Mesh, shard
from tests.mpi.equality import check, close, kept_for_backward, mean_over_ranks, parameter, storage


def a_line(channels: int, mesh: Mesh) -> Tensor:
    """One row of 36 pixels, or a column on a grid of one row: some ranks have none."""
    rows, cols = mesh.grid
    shape, kernel = ((rows, 36), (rows, 1)) if rows > 1 else ((36, cols), (1, cols))
    image = shard(torch.rand(1, channels, *shape, dtype=torch.float64), mesh)
    return F.max_pool2d(image, kernel).detach().requires_grad_()


def test_where_ranks_have_no_pixels_the_copied_halo_is_not_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        line = a_line(4, mesh)
        weight = torch.rand(4, 4, 3, 3, dtype=torch.float64).requires_grad_()

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return F.conv2d(x, weight, padding=1)

        kept = kept_for_backward(convolve, line, weight)
        others = sum(kept.values()) - line.to_local().nbytes - weight.nbytes
        assert 0 <= others <= 8 * 4 * 2  # a pixel at either end
        frozen = kept_for_backward(convolve, line, weight.detach())
        assert set(frozen) == {storage(weight)}  # the gradient of the image reads no pixel


def test_frozen_operands_where_ranks_have_no_pixels(meshes: dict) -> None:
    weight, bias = parameter(random.Random(3), 2, 4, 3, 3), parameter(random.Random(4), 2)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.max_pool2d(x, 3), weight, bias, padding=1)

    for mesh in meshes.values():
        image, where = parameter(random.Random(5), 1, 4, 4, 4), f"on {mesh.grid}: "
        check(convolve, image, [weight, bias], mesh, where)
        check(lambda x: convolve(x, weight, bias), image, [], mesh, where)
        check(lambda x, weight: convolve(x, weight, bias), image, [weight], mesh, where)
        for trained in (0, 1):
            grads = []
            for x in (shard(image, mesh), image):
                leaves = [weight.clone(), bias.clone()]
                leaves[trained].requires_grad_()
                loss = convolve(x, *leaves).square().sum()
                grads += torch.autograd.grad(loss, [leaves[trained]])
            close(mean_over_ranks(grads[0], mesh), grads[1], where)


LARGE = {
    "3x3": {"padding": 1},
    "stride": {"padding": 1, "stride": 2},
    "dilation": {"padding": (2, 1), "dilation": (2, 1)},
    "groups": {"padding": (0, 1), "groups": 2},
    "same": {"padding": "same"},
}


@pytest.mark.parametrize("name", LARGE)
def test_weights_larger_than_tiles(name: str, meshes: dict) -> None:
    """There copying the tile is cheaper than copying the taps that strips meet."""
    rng = random.Random(6)
    weight = parameter(rng, 24, 32 // LARGE[name].get("groups", 1), 3, 3) / 8
    for mesh in meshes.values():
        image = parameter(rng, 2, 32, 11, 13)

        def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.conv2d(x, weight, bias, **LARGE[name])

        check(convolve, image, [weight, parameter(rng, 24)], mesh, f"{name} on {mesh.grid}: ")


def test_beside_large_weights_only_what_other_ranks_sent_is_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        image = torch.rand(1, 32, 12, 12, dtype=torch.float64)
        x = shard(image, mesh).detach().requires_grad_()
        weight = torch.rand(64, 32, 3, 3, dtype=torch.float64).requires_grad_()
        kept = kept_for_backward(lambda x, w: F.conv2d(x, w, padding=1), x, weight)
        rows, cols = (12 // n for n in mesh.grid)
        strips = 2 * 32 * (rows + cols + 2) * 8
        assert sum(kept.values()) - x.to_local().nbytes - weight.nbytes <= strips
