from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, draw, kept_for_backward, parameter, seeds


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_unfold(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes)

    def unfold(x: Tensor) -> Tensor:
        return F.unfold(x, s.kernel, s.dilation, s.padding, s.stride)

    check(unfold, s.image, [], s.mesh, str(s))


@pytest.mark.parametrize("seed", seeds(8, 100))
def test_windows_along_a_dim(seed: int, meshes: dict) -> None:
    """Of rows, columns or channels, of maps whose channels are the first or the last dim."""
    rng = random.Random(seed)
    s = draw(rng, meshes)
    dim, last = rng.choice((1, 2, 3, -1)), rng.choice((True, False))
    size = rng.randint(1, 3 if dim == 1 and not last else 2)
    step = rng.randint(1, 3)

    def windows(x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if last else x
        return x.unfold(dim, size, step).sin()

    check(windows, s.image, [], s.mesh, f"{s}, {dim}, {size}, {step}")


def test_windows_along_both_dims(meshes: dict) -> None:
    for mesh in meshes.values():
        check(
            lambda x: x.unfold(2, 3, 1).unfold(3, 4, 2).square().mean((-1, -2)),
            *(parameter(random.Random(1), 2, 3, 9, 8), [], mesh, f"on {mesh.grid} "),
        )


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


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_fold(seed: int, meshes: dict) -> None:
    """Of tokens that are not what any image gives: each window has values of its own."""
    rng = random.Random(seed)
    s = draw(rng, meshes)
    steps = (s.kernel, s.dilation, s.padding, s.stride)
    taps = s.kernel[0] * s.kernel[1]

    def fold(x: Tensor, weight: Tensor) -> Tensor:
        tokens = torch.tanh(F.unfold(x, *steps).transpose(1, 2) @ weight).transpose(1, 2)
        return F.fold(tokens, x.shape[-2:], *steps)

    check(fold, s.image, [parameter(rng, 4 * taps, 3 * taps)], s.mesh, str(s))


def test_a_transposed_convolution_by_fold(meshes: dict) -> None:
    """To other sizes than the tokens came from, and with ranks that have none."""

    def raised(x: Tensor, weight: Tensor) -> Tensor:
        size = [2 * n + 3 for n in x.shape[-2:]]
        tokens = weight @ x.flatten(2)
        return nn.Fold(size, 5, stride=2, padding=0)(tokens)

    def few(x: Tensor, weight: Tensor) -> Tensor:
        return raised(F.max_pool2d(x, 3, 3), weight)

    weight = parameter(random.Random(0), 2 * 25, 3)
    for mesh in meshes.values():
        for size in ((9, 8), (6, 6), (4, 13)):
            image = parameter(random.Random(1), 2, 3, *size)
            check(raised, image, [weight], mesh, f"{size} on {mesh.grid}")
        check(few, parameter(random.Random(2), 2, 3, 6, 6), [weight], mesh, f"on {mesh.grid}")


def test_folding_tokens_keeps_none_of_them(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 16, 12), mesh).requires_grad_()
        assert kept_for_backward(lambda x: F.fold(x.flatten(2), (17, 13), 2), x) == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.fold(x.flatten(2), (5, 17), 2),  # other rows and columns, as many windows
        lambda x: F.fold(x.flatten(2).transpose(1, 2), (3, 3), 2),
        lambda x: F.fold(x.flatten(2)[0], (9, 9), 2),
    ],
)
def test_folds_of_anything_else_are_refused_by_name(call: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match="fold is not supported"):
            call(shard(torch.rand(1, 4, 8, 8), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.fold(x.flatten(2), (9, 10), 2),
        lambda x: F.fold(x.flatten(2), (1, 1), 2),
        lambda x: F.fold(x.flatten(2), (10, 10), 3),
        lambda x: F.fold(x.flatten(2), (9, 9), 2, stride=0),
        lambda x: F.fold(x.flatten(2), (5, 9), 2, padding=(-1, 0)),
    ],
)
def test_what_pytorch_does_not_fold_is_refused_on_every_rank(call: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 8, 8), mesh)
        with pytest.raises(ValueError, match="fold"):
            call(x)
        with pytest.raises((ValueError, RuntimeError)):
            call(x.full_tensor())


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


def test_windows_along_one_dim_where_ranks_have_none(meshes: dict) -> None:
    for mesh in meshes.values():
        image = parameter(random.Random(1), 2, 5, 9, 8)
        check(
            lambda x: F.max_pool2d(x.unfold(2, 4, 2)[..., 0], 2).unfold(-1, 2, 1),
            image,
            [],
            mesh,
            f"on {mesh.grid}",
        )
