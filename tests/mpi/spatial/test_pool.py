"""Pooling of split images, to any size too, against one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import init_mesh, shard
from spatialdl.spatial import SpatialTensor
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    close,
    draw,
    drawn,
    every_mesh,
    functional,
    in_all_dims,
)
from tests.mpi.spatial.shared import Cases, tokens


@pytest.mark.tiles
@in_all_dims(4, 300)
def test_max_pooling(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims), pooling=True)
    stride = rng.choice((None, s.stride))
    ceil_mode = rng.random() < 0.5

    def pool(x: Tensor) -> Tensor:
        pool = functional("max_pool", dims)
        return pool(x, s.kernel, stride, s.padding, s.dilation, ceil_mode)

    check(pool, s.image, [], s.mesh, f"{s}, stride {stride}, ceil {ceil_mode}")


@pytest.mark.tiles
@in_all_dims(4, 300)
def test_average_pooling(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims), pooling=True)
    stride = rng.choice((None, s.stride))
    options = [rng.random() < 0.5, rng.random() < 0.5, rng.choice((None, None, 3))]
    if dims == 1:
        options.pop()  # PyTorch's takes no divisor
    kernel, padding = s.kernel, s.padding
    if dims == 3:  # PyTorch's takes no kernel larger than the image without its padding
        kernel = tuple(min(k, n) for k, n in zip(kernel, s.image.shape[2:], strict=True))
        padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))

    def pool(x: Tensor) -> Tensor:
        return functional("avg_pool", dims)(x, kernel, stride, padding, *options)

    check(pool, s.image, [], s.mesh, f"{s}, stride {stride}, options {options}")


def _one_if_alone(*values: Any) -> list[Any]:
    """`F.lp_pool1d` takes numbers."""
    return [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in values]


def norms() -> tuple[float, ...]:
    """Without infinity, whose gradient is NaN in PyTorch 2.11 itself."""
    x = torch.ones(1, 1, 4, requires_grad=True)
    F.lp_pool1d(x, float("inf"), 2).sum().backward()
    return (1, 2, 3, 2.0, *((float("inf"),) if x.grad.isfinite().all() else (2,)))


@pytest.mark.tiles
@in_all_dims(3, 200)
def test_lp_pooling(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims), pooling=True)
    kernel = tuple(min(k, n) for k, n in zip(s.kernel, s.image.shape[2:], strict=True))
    stride = rng.choice((None, s.stride))
    norm, ceil_mode = rng.choice(norms()), rng.random() < 0.5

    def pool(x: Tensor) -> Tensor:
        return functional("lp_pool", dims)(x, norm, *_one_if_alone(kernel, stride), ceil_mode)

    image = s.image.abs() + 0.1 if norm == 3 else s.image  # a root of a sum below zero has none
    check(pool, image, [], s.mesh, f"{s}, norm {norm}, stride {stride}, ceil {ceil_mode}")


def draw_size(rng: random.Random, dims: int) -> Any:
    """Smaller than the grid, larger than the image, one of them left as it is."""
    if dims == 1:  # PyTorch's takes no None there
        return rng.choice((1, 2, 3, 5, 7, 11))
    sizes = [rng.choice((1, 1, 2, 3, 5, 7, 11, None)) for _ in range(dims)]
    return rng.choice((tuple(sizes), tuple(sizes), rng.choice((1, 2, 6))))


@pytest.mark.tiles
@pytest.mark.parametrize("kind", ["avg", "max"])
@in_all_dims(4, 300)
def test_adaptive_pooling(dims: int, seed: int, kind: str) -> None:
    rng = random.Random(seed)
    s, size = draw(rng, every_mesh(dims)), draw_size(rng, dims)
    pool = functional(f"adaptive_{kind}_pool", dims)
    check(lambda x: pool(x, size), s.image, [], s.mesh, f"{s} to {size}")


def adaptive(pool: Operation, size: Any) -> Operation:
    return lambda x: pool(x, size)


def few(pool: Operation) -> Operation:
    """Fewer pixels than ranks."""
    return lambda x: pool(F.max_pool2d(x, 3, 3))


def head(pool: Operation, size: Any = 1) -> Operation:
    """As Swin's: tokens are put behind the channels, and pooled to a plain tensor."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        pooled = pool((tokens(x) @ weight).transpose(1, 2), size)
        assert not isinstance(pooled, SpatialTensor)
        return pooled

    return run


SIZE = (2, 3, 13, 11)
OF_IMAGES: dict[str, Operation] = {"average": F.adaptive_avg_pool2d, "max": F.adaptive_max_pool2d}
OF_TOKENS: dict[str, Operation] = {"average": F.adaptive_avg_pool1d, "max": F.adaptive_max_pool1d}
CASES: Cases = {
    **{
        str(layer): (layer, SIZE, [])
        for layer in (
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            nn.LPPool2d(2, (3, 2), 2),
            nn.AdaptiveAvgPool2d((None, 4)),
            nn.AdaptiveMaxPool2d((3, None)),
        )
    },
    **{
        f"{name} of few pixels": (few(adaptive(pool, (2, 3))), (2, 3, 6, 6), [])
        for name, pool in OF_IMAGES.items()
    },
    **{
        f"{name} of {what}": (operation, size, [(3, 5)])
        for name, pool in OF_TOKENS.items()
        for what, operation, size in (
            ("tokens", head(pool), SIZE),
            ("tokens to (1,)", head(pool, (1,)), (2, 3, 9, 4)),
            ("few tokens", lambda x, w, p=pool: head(p)(F.max_pool2d(x, 3), w), (2, 3, 6, 6)),
            ("equal tokens", lambda x, w, p=pool: head(p)(x.clamp(9), w), (2, 3, 6, 6)),
        )
    },
    **{  # with ceil mode the last window may reach beyond the padding; that part never counts
        f"windows that hang over, {padding}, {options}": (
            lambda x, p=padding, o=options: F.avg_pool2d(x, 4, 3, p, True, *o),
            (1, 2, *size),
            [],
        )
        for padding, options, size in (
            (0, (True, None), (8, 9)),
            (1, (True, None), (12, 11)),
            (1, (False, None), (18, 7)),
            (0, (False, 5), (12, 11)),
            (1, (True, 5), (8, 9)),
        )
    },
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


@pytest.mark.tiles
@pytest.mark.parametrize("kind", OF_IMAGES)
def test_images_of_one_pixel_a_rank(kind: str, meshes: dict) -> None:
    for grid, mesh in meshes.items():
        for size in ((1, 2), (5, 3), (None, None)):
            pool = adaptive(OF_IMAGES[kind], size)
            check(pool, drawn(0, 2, 3, *grid), [], mesh, f"{grid} to {size}")
        for size in (grid, (grid[0], 5), (7, grid[1])):
            pool = adaptive(lambda x, n: OF_TOKENS[kind](x.flatten(2), n), 1)
            check(pool, drawn(5, 2, 3, *size), [], mesh, f"tokens of {size} on {grid}")


def test_to_one_pixel_it_is_whole_and_the_same_everywhere(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(2, 3, 9, 8), mesh)
        for pool in OF_IMAGES.values():
            of_all = MPI.COMM_WORLD.allgather(pool(x, 1))
            assert all(type(one) is Tensor and torch.equal(one, of_all[0]) for one in of_all)
            assert isinstance(pool(x, (1, 2)), SpatialTensor)
        for pool in (nn.AdaptiveAvgPool1d(1), nn.AdaptiveMaxPool1d(1)):
            of_all = MPI.COMM_WORLD.allgather(pool(x.flatten(2)))
            assert all(torch.equal(one, of_all[0]) for one in of_all)


def test_max_pooling_of_whole_numbers_pads_below_all_of_them(meshes: dict) -> None:
    labels = torch.arange(-60, 0).reshape(1, 1, 10, 6)
    for mesh in meshes.values():
        ours = F.max_pool2d(shard(labels, mesh), 3, 2, 1).full_tensor()
        assert torch.equal(ours, F.max_pool2d(labels.double(), 3, 2, 1).long())


def test_ranks_inside_and_at_the_edges_send_halos_of_one_type() -> None:
    """A rank without padding divided by the whole window, and so summed in half precision."""
    image = drawn(0, 1, 2, 26, 6).half()
    x = shard(image, init_mesh((MPI.COMM_WORLD.size, 1)))
    pooled = F.avg_pool2d(x, (3, 1), (2, 1), (1, 0), True, False).full_tensor()
    exact = F.avg_pool2d(image.double(), (3, 1), (2, 1), (1, 0), True, False)
    torch.testing.assert_close(pooled.double(), exact, rtol=1e-3, atol=1e-3)


def with_ties(case: str) -> Tensor:
    image = drawn(4, 2, 3, 12, 10)
    if case == "all equal":
        image.fill_(2.0)
    elif case == "zeros after relu":
        image = (image - 1).clamp(min=0)
    elif case == "nan":
        image[:, :, ::2, ::3] = torch.nan
    else:
        image[:, :, :6] = image[:, 1] = -torch.inf
        image[:, 1, 8, 7] = torch.nan
    return image


MAXIMA: dict[str, Operation] = {
    "windows": lambda x: F.max_pool2d(x, 4, 2, 2),
    "dilated windows": lambda x: F.max_pool2d(x, 4, 2, 2, 2),
    "one": lambda x: F.adaptive_max_pool2d(x, 1),
    "some": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "more": lambda x: F.adaptive_max_pool2d(x, 7),
}


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.parametrize("case", ["all equal", "zeros after relu", "nan", "minus infinity"])
def test_the_gradient_of_a_maximum_goes_to_the_pixel_that_pytorch_names(
    case: str, name: str, meshes: dict
) -> None:
    image = with_ties(case)
    for mesh in meshes.values():
        grads, values = [], []
        for split in (False, True):
            leaf = image.clone().requires_grad_()
            y = MAXIMA[name](shard(leaf, mesh) if split else leaf)
            y = y.full_tensor() if isinstance(y, SpatialTensor) else y
            grads += torch.autograd.grad(y, [leaf], drawn(5, *y.shape))
            values.append(y)
        torch.testing.assert_close(values[1], values[0], equal_nan=True, rtol=0, atol=0)
        close(grads[1], grads[0], f"{name} on {mesh.grid} ")
