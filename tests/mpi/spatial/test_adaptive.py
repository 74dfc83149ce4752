from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from spatialdl.spatial import SpatialTensor
from tests.mpi.equality import (
    Operation,
    check,
    draw,
    every_mesh,
    functional,
    in_all_dims,
    kept_for_backward,
    parameter,
)

POOLS: dict[str, Operation] = {"average": F.adaptive_avg_pool2d, "max": F.adaptive_max_pool2d}
each_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
each_kind = pytest.mark.parametrize("kind", ["avg", "max"])


def draw_size(rng: random.Random, dims: int) -> Any:
    """Smaller than the grid, larger than the image, one of them left as it is."""
    if dims == 1:  # PyTorch's takes no None there
        return rng.choice((1, 2, 3, 5, 7, 11))
    sizes = [rng.choice((1, 1, 2, 3, 5, 7, 11, None)) for _ in range(dims)]
    return rng.choice((tuple(sizes), tuple(sizes), rng.choice((1, 2, 6))))


@each_kind
@in_all_dims(12, 300)
def test_adaptive_pooling(dims: int, seed: int, kind: str) -> None:
    rng = random.Random(seed)
    s, size = draw(rng, every_mesh(dims)), draw_size(rng, dims)
    pool = functional(f"adaptive_{kind}_pool", dims)
    check(lambda x: pool(x, size), s.image, [], s.mesh, f"{s} to {size}")


@each_pool
def test_images_of_one_pixel_a_rank(pool: Operation, meshes: dict) -> None:
    for grid, mesh in meshes.items():
        image = parameter(random.Random(0), 2, 3, *grid)
        for size in ((1, 1), (1, 2), (5, 3), (None, None)):
            check(lambda x, size=size: pool(x, size), image, [], mesh, f"{grid} to {size}")


@each_pool
def test_where_ranks_have_no_pixels(pool: Operation, meshes: dict) -> None:
    def few(x: Tensor) -> Tensor:
        return pool(F.max_pool2d(x, 3, 3), (2, 3))

    for mesh in meshes.values():
        check(few, parameter(random.Random(1), 2, 3, 6, 6), [], mesh, f"on {mesh.grid}")


@each_pool
def test_to_one_pixel_it_is_whole_and_the_same_everywhere(pool: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(2, 3, 9, 8), mesh)
        whole = pool(x, 1)
        assert not isinstance(whole, SpatialTensor)
        of_all = MPI.COMM_WORLD.allgather(whole)
        assert all(torch.equal(value, whole) for value in of_all)
        assert isinstance(pool(x, (1, 2)), SpatialTensor)


def test_modules_pool_as_their_functions(meshes: dict) -> None:
    weight = parameter(random.Random(2), 3, 3, 1, 1)

    def gate(x: Tensor, weight: Tensor) -> Tensor:
        average, highest = nn.AdaptiveAvgPool2d(1)(x), nn.AdaptiveMaxPool2d((1, 1))(x)
        return x * torch.sigmoid(F.conv2d(average, weight) + F.conv2d(highest, weight))

    for mesh in meshes.values():
        image = parameter(random.Random(3), 2, 3, 13, 11)
        check(gate, image, [weight], mesh, f"gate on {mesh.grid}")
        for layer in (nn.AdaptiveAvgPool2d((None, 4)), nn.AdaptiveMaxPool2d((3, None))):
            check(layer, image, [], mesh, f"{layer} on {mesh.grid}")


@pytest.mark.parametrize("size", [1, (2, 3), 7])
@pytest.mark.parametrize("case", ["all equal", "zeros after relu", "nan", "minus infinity"])
def test_the_gradient_of_a_maximum_goes_to_the_pixel_that_pytorch_names(
    case: str, size: Any, meshes: dict
) -> None:
    image = parameter(random.Random(4), 2, 3, 11, 10)
    if case == "all equal":
        image.fill_(2.0)
    elif case == "zeros after relu":
        image = (image - 1).clamp(min=0)
    elif case == "nan":
        image[:, :, ::2, ::3] = float("nan")
    else:
        image[:, 1:] = float("-inf")
    for mesh in meshes.values():
        grads, values = [], []
        for split in (False, True):
            leaf = image.clone().requires_grad_()
            y = F.adaptive_max_pool2d(shard(leaf, mesh) if split else leaf, size)
            y = y.full_tensor() if isinstance(y, SpatialTensor) else y
            grads += torch.autograd.grad(y, [leaf], parameter(random.Random(5), *y.shape))
            values.append(y)
        torch.testing.assert_close(values[1], values[0], equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@each_pool
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_of_numbers(dtype: torch.dtype, pool: Operation, meshes: dict) -> None:
    draws = torch.Generator().manual_seed(0)
    image = torch.randint(-3, 4, (2, 4, 12, 8), generator=draws).to(dtype)
    for mesh in meshes.values():
        for size in (1, 4, (3, None)):
            for x in (image, image.to(memory_format=torch.channels_last)):
                ours, plain = pool(shard(x, mesh), size), pool(x, size)
                assert ours.dtype == dtype
                whole = ours.full_tensor() if isinstance(ours, SpatialTensor) else ours
                torch.testing.assert_close(whole, plain)


@each_pool
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard: type, pool: Operation, meshes: dict) -> None:
    image = parameter(random.Random(6), 1, 2, 11, 12)
    for mesh in meshes.values():
        for x in (image, image.clone().requires_grad_()):
            with guard():
                ours = pool(shard(x, mesh), (3, 2))
                assert not ours.requires_grad
                torch.testing.assert_close(ours.full_tensor(), pool(x, (3, 2)))


def test_backward_keeps_no_pixel(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        for size in (1, 3, (4, None)):
            average: Operation = lambda x, size=size: F.adaptive_avg_pool2d(x, size)  # noqa: E731
            assert sum(kept_for_backward(average, x).values()) <= 8
        places = kept_for_backward(lambda x: F.adaptive_max_pool2d(x, 3), x)
        assert sum(places.values()) <= 4 * 3 * 3 * 8  # of what the tile touches


def test_places_and_outputs_without_pixels_are_refused_by_name(meshes: dict) -> None:
    calls: list[Operation] = [
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[0],
        lambda x: nn.AdaptiveMaxPool2d(2, return_indices=True)(x)[0],
        lambda x: F.adaptive_max_pool2d_with_indices(x, 1)[0],
        lambda x: torch._C._nn.adaptive_max_pool2d(x, (2, 2))[0],
        lambda x: F.adaptive_max_pool2d(x, 0),
    ]
    for mesh in meshes.values():
        for call in calls:
            with pytest.raises(UnsupportedSpatialOp, match="adaptive_max_pool2d"):
                call(shard(torch.rand(1, 4, 8, 8), mesh))


@each_pool
def test_what_pytorch_refuses_is_refused_on_every_rank(pool: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        numbers = shard(torch.ones(1, 4, 8, 8, dtype=torch.int64), mesh)
        for x, size in ((numbers, 2), (numbers.double(), (2, -1)), (numbers.double(), (1, 2, 3))):
            with pytest.raises(ValueError, match="adaptive_"):
                pool(x, size)
            with pytest.raises((ValueError, RuntimeError)):
                pool(x.full_tensor(), size)


TOKEN_POOLS: dict[str, Operation] = {"average": F.adaptive_avg_pool1d, "max": F.adaptive_max_pool1d}
each_token_pool = pytest.mark.parametrize("pool", TOKEN_POOLS.values(), ids=TOKEN_POOLS)


@each_token_pool
def test_tokens_are_pooled_to_one(pool: Operation, meshes: dict) -> None:
    """As Swin does: tokens are put behind the channels, and pooled to a plain tensor."""

    def head(x: Tensor, weight: Tensor, size: Any = 1) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) @ weight
        pooled = pool(tokens.transpose(1, 2), size)
        assert not isinstance(pooled, SpatialTensor)
        return pooled

    weight = parameter(random.Random(2), 3, 5)
    for grid, mesh in meshes.items():
        for size in ((13, 11), (9, 4)):
            image = parameter(random.Random(3), 2, 3, *size)
            check(head, image, [weight], mesh, f"{size} on {grid}")
        check(lambda x, w: head(x, w, (1,)), image, [weight], mesh, f"a tuple on {grid}")
        few = parameter(random.Random(4), 2, 3, 6, 6)
        check(lambda x, w: head(F.max_pool2d(x, 3, 3), w), few, [weight], mesh, f"few on {grid}")
        for size in (grid, (grid[0], 5), (7, grid[1])):
            image = parameter(random.Random(5), 2, 3, *size)
            check(lambda x: pool(x.flatten(2), 1), image, [], mesh, f"{size} on {grid}")
        ties: Operation = lambda x: pool(x.relu().flatten(2), 1)  # noqa: E731
        check(ties, -few.abs(), [], mesh, f"ties on {grid}")


def test_modules_pool_tokens_as_their_functions(meshes: dict) -> None:
    image = parameter(random.Random(5), 2, 3, 7, 10)
    for mesh in meshes.values():
        for layer in (nn.AdaptiveAvgPool1d(1), nn.AdaptiveMaxPool1d(1)):
            of_tokens: Operation = lambda x, layer=layer: layer(x.flatten(2))  # noqa: E731
            check(of_tokens, image, [], mesh, f"{layer} on {mesh.grid}")
            of_all = MPI.COMM_WORLD.allgather(of_tokens(shard(image, mesh)))
            assert all(torch.equal(value, of_all[0]) for value in of_all)


@each_token_pool
@pytest.mark.parametrize(
    "tokens",
    [
        lambda x, pool: pool(x.flatten(2), 2),
        lambda x, pool: pool(x.flatten(2), (3,)),
        lambda x, pool: pool(x.flatten(2).transpose(1, 2), 1),  # over channels
        lambda x, pool: pool(x[0], 1),  # (C, H, W)
        lambda x, pool: pool(x.flatten(2)[0], 1),  # (C, H*W)
        lambda x, pool: pool(x.transpose(0, 1).reshape(4, -1)[None], 1),  # (1, C, N*H*W)
    ],
)
def test_other_pools_of_tokens_are_refused_by_name(
    tokens: Operation, pool: Operation, meshes: dict
) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match=r"adaptive_(avg|max)_pool1d"):
            tokens(shard(torch.rand(2, 4, 8, 8), mesh), pool)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.adaptive_max_pool1d(x, 1, return_indices=True),
        nn.AdaptiveMaxPool1d(1, return_indices=True),
        lambda x: F.adaptive_max_pool1d_with_indices(x, 1),
        lambda x: torch.adaptive_max_pool1d(x, 1),
    ],
)
def test_places_of_tokens_are_refused_by_name(call: Operation, meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match="adaptive_max_pool1d"):
            call(shard(torch.rand(2, 4, 8, 8), mesh).flatten(2))
