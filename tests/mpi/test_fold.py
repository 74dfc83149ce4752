from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, draw, kept_for_backward, parameter, seeds


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_unfold(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes)

    def unfold(x: Tensor) -> Tensor:
        return F.unfold(x, s.kernel, s.dilation, s.padding, s.stride)

    check(unfold, s.image, [], s.mesh, str(s))


def test_a_convolution_by_unfold(meshes: dict) -> None:
    weight = parameter(random.Random(0), 5, 3 * 9)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(nn.Unfold(3, padding=1)(x).transpose(1, 2) @ weight.t())

    for mesh in meshes.values():
        check(convolve, parameter(random.Random(1), 2, 3, 9, 8), [weight], mesh, f"on {mesh.grid}")


def test_backward_keeps_no_pixel(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 16, 12), mesh).requires_grad_()
        assert kept_for_backward(lambda x: F.unfold(x, 3, padding=1), x) == {}


def test_fold_is_refused_by_name(meshes: dict) -> None:
    for mesh in meshes.values():
        tokens = F.unfold(shard(torch.rand(1, 4, 8, 8), mesh), 2, stride=2)
        with pytest.raises(UnsupportedSpatialOp, match="fold cannot be done"):
            F.fold(tokens, (8, 8), 2, stride=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.unfold(x, 9),
        lambda x: F.unfold(x, 2, stride=0),
        lambda x: F.unfold(x, 2, padding=-1),
    ],
)
def test_what_pytorch_refuses_is_refused_on_every_rank(call: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 8, 8), mesh)
        with pytest.raises(ValueError, match="unfold"):
            call(x)
        with pytest.raises((ValueError, RuntimeError)):
            call(x.full_tensor())
