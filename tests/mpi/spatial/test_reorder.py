"""Views that mix pixels with channels: ranks exchange elements."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, shard
from tests.mpi.device import DEVICE
from tests.mpi.equality import check, check_in, parameter, several_ranks

N, C, H, W = 2, 5, 7, 6
Meshes = dict[tuple[int, ...], Mesh]


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens as channels": lambda x: tokens(x).reshape(N, C, H, W),
    "channels last as channels": lambda x: x.permute(0, 2, 3, 1).reshape(N, C, H, W),
    "channels as tokens": lambda x: x.flatten(2).reshape(N, H * W, C),
    "and back": lambda x: tokens(x.reshape(N, H * W, C)).sin().reshape(N, H * W, C).mT,
    "columns first": lambda x: x.transpose(2, 3).flatten(2),
    "columns first and back": lambda x: x.mT.flatten(2).sin().view(N, C, H, W).cos(),
    "samples and pixels": lambda x: x.permute(2, 3, 0, 1).reshape(N, C, H, W),
    "rows and channels": lambda x: x.transpose(1, 2).reshape(N, C, H, W),
    "dims apart": lambda x: x.flatten(1).view(N, H, C, W),
    "more dims": lambda x: tokens(x).reshape(N, 1, C, 1, H, W),
    "few channels": lambda x: x[:, :1].permute(0, 3, 2, 1).reshape(N, 1, H, W),
    "pixels in parts": lambda x: x.mT.reshape(N, C, H * W).relu().mT.reshape(N, H, W, C),
    "empty tiles": lambda x: tokens(F.max_pool2d(x, 3)).reshape(N, C, 2, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients(name: str, meshes: Meshes) -> None:
    for mesh in meshes.values():
        check(VIEWS[name], parameter(random.Random(0), N, C, H, W), [], mesh, f"{name} {mesh.grid}")


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    check_in(dims, lambda x: tokens(x).reshape(x.shape), "tokens as channels")
    check_in(dims, lambda x: x.transpose(1, 2).reshape(x.shape).sin(), "rows and channels")


def test_attention_between_all_pixels(meshes: Meshes) -> None:
    """Weights of all pairs are divided by their sum; the result is read as if channels came first.

    So does the decoder of MA-Net (Fan et al., 2020).
    """

    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = F.conv2d(x, k).flatten(2)
        queries, values = tokens(F.conv2d(x, q)), tokens(F.conv2d(x, v, padding=1))
        weights = torch.matmul(queries, keys).view(N, -1).softmax(1).view(N, H * W, H * W)
        return x + torch.matmul(weights, values).reshape(N, C, H, W)

    weights = [parameter(random.Random(n), 3, C, 1, 1) for n in (1, 2)]
    weights.append(parameter(random.Random(3), C, C, 3, 3))
    for mesh in meshes.values():
        check(attention, parameter(random.Random(0), N, C, H, W), weights, mesh, f"{mesh.grid}")


def test_each_rank_holds_its_share(meshes: Meshes) -> None:
    for mesh in several_ranks(meshes):
        image = shard(torch.rand(N, C, H, W).to(DEVICE), mesh)
        view = tokens(image).reshape(N, C, H, W)
        assert isinstance(view, SpatialTensor)
        assert view.to_local().shape == image.to_local().shape


@pytest.mark.parametrize("view", [VIEWS["tokens as channels"], lambda x: x.view(N, C, H, 2, 3)])
def test_it_is_not_written_into_while_its_base_lives(
    view: Callable[[Tensor], Tensor], meshes: Meshes
) -> None:
    """Where elements have moved between ranks, the base would not change."""
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(N, C, H, W).to(DEVICE), mesh)
        y = view(x)
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            y.add_(1)
