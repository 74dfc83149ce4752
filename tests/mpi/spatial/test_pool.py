from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import (
    Operation,
    check,
    close,
    draw,
    every_mesh,
    functional,
    in_all_dims,
    kept_for_backward,
    parameter,
)


@in_all_dims(12, 300)
def test_max_pooling(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims), pooling=True)
    stride = rng.choice((None, s.stride))
    ceil_mode = rng.random() < 0.5

    def pool(x: Tensor) -> Tensor:
        pool = functional("max_pool", dims)
        return pool(x, s.kernel, stride, s.padding, s.dilation, ceil_mode)

    check(pool, s.image, [], s.mesh, f"{s}, stride {stride}, ceil {ceil_mode}")


@in_all_dims(12, 300)
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


@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_average_of_windows_that_hang_over(
    padding: int, include_pad: bool, divisor: int | None, meshes: dict
) -> None:
    """With ceil mode the last window may reach beyond the padding; that part never counts."""

    def pool(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 4, 3, padding, True, include_pad, divisor)

    for mesh in meshes.values():
        for size in ((8, 9), (12, 11), (18, 7)):
            image = parameter(random.Random(6), 1, 2, *size)
            check(pool, image, [], mesh, f"{size} on {mesh.grid}")


def test_max_pooling_of_whole_numbers_pads_below_all_of_them(meshes: dict) -> None:
    labels = torch.arange(-60, 0).reshape(1, 1, 10, 6)
    for mesh in meshes.values():
        ours = F.max_pool2d(shard(labels, mesh), 3, 2, 1).full_tensor()
        assert torch.equal(ours, F.max_pool2d(labels.double(), 3, 2, 1).long())


def _one_if_alone(*values: Any) -> list[Any]:
    """`F.lp_pool1d` takes numbers."""
    return [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in values]


def norms() -> tuple[float, ...]:
    """Without infinity, whose gradient is NaN in PyTorch 2.11 itself."""
    x = torch.ones(1, 1, 4, requires_grad=True)
    F.lp_pool1d(x, float("inf"), 2).sum().backward()
    return (1, 2, 3, 2.0, *((float("inf"),) if x.grad.isfinite().all() else (2,)))


@in_all_dims(8, 200)
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


def test_modules_pool_as_their_functions(meshes: dict) -> None:
    image = parameter(random.Random(7), 2, 3, 13, 11)
    for mesh in meshes.values():
        for layer in (
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            nn.LPPool2d(2, (3, 2), 2),
        ):
            check(layer, image, [], mesh, f"{layer} on {mesh.grid}")


def test_a_chain_of_poolings_down_to_ranks_without_pixels(meshes: dict) -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.avg_pool2d(F.max_pool2d(torch.sin(x), 3, 2, 1), 3, 1, 1)
        return x

    for mesh in meshes.values():
        check(chain, parameter(random.Random(8), 2, 3, 19, 14), [], mesh, f"on {mesh.grid}")


@pytest.mark.parametrize("dilation", [1, 2])
def test_where_all_is_minus_infinity_the_gradient_goes_where_pytorch_sends_it(
    dilation: int, meshes: dict
) -> None:
    image = parameter(random.Random(9), 1, 2, 12, 10)
    image[:, :, :6] = float("-inf")
    image[:, 1] = float("-inf")
    image[:, 1, 8, 7] = float("nan")
    for mesh in meshes.values():
        grads = []
        for split in (False, True):
            leaf = image.clone().requires_grad_()
            y = F.max_pool2d(shard(leaf, mesh) if split else leaf, 4, 2, 2, dilation)
            weight = parameter(random.Random(10), *y.shape)
            y = y.full_tensor() if split else y
            grads += torch.autograd.grad(y, [leaf], weight)
        close(grads[1], grads[0], f"on {mesh.grid}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_other_types_of_numbers(dtype: torch.dtype, channels_last: bool, meshes: dict) -> None:
    draws = torch.Generator().manual_seed(0)
    image = (torch.randn(2, 4, 11, 13, generator=draws) * 9).to(dtype)
    if channels_last:
        image = image.to(memory_format=torch.channels_last)
    calls: list[Operation] = [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        lambda x: F.avg_pool2d(x, 2, divisor_override=7),
    ]
    for mesh in meshes.values():
        for call in calls:
            with torch.no_grad():
                ours, plain = call(shard(image, mesh)), call(image)
            assert ours.dtype == dtype
            assert torch.equal(ours.full_tensor(), plain)
            tile = ours.to_local()
            if channels_last:
                assert tile.is_contiguous(memory_format=torch.channels_last)
            else:
                assert tile.is_contiguous()
            if dtype.is_floating_point:
                grads = []
                for split in (False, True):
                    leaf = image.clone().requires_grad_()
                    y = call(shard(leaf, mesh) if split else leaf)
                    grads += torch.autograd.grad(y.float().square().sum(), [leaf])
                # sums over windows that overlap are rounded in another order
                near = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(grads[1], grads[0], rtol=near, atol=near)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard: type, meshes: dict) -> None:
    image = parameter(random.Random(11), 1, 2, 11, 12)
    for mesh in meshes.values():
        for x in (image, image.clone().requires_grad_()):
            with guard():
                for call in (F.max_pool2d, F.avg_pool2d):
                    ours = call(shard(x, mesh), 3, 2, 1)
                    assert not ours.requires_grad
                    close(ours.full_tensor(), call(x, 3, 2, 1), "value")


def test_average_pooling_keeps_no_pixel_and_max_pooling_its_places_only(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        for options in ((2,), (3, 2, 1), (5, 1, 2, True, False)):
            average: Operation = lambda x, options=options: F.avg_pool2d(x, *options)  # noqa: E731
            assert kept_for_backward(average, x) == {}
        places = kept_for_backward(lambda x: F.max_pool2d(x, 3, 2, 1), x)
        outputs = F.max_pool2d(x, 3, 2, 1).to_local()
        border = 4 * 2 * sum(outputs.shape[2:])  # whose windows reach to other tiles: twice
        assert 8 * outputs.numel() <= sum(places.values()) <= 8 * (outputs.numel() + border)


def test_places_and_random_windows_are_refused_by_name(meshes: dict) -> None:
    calls: list[tuple[str, Operation]] = [
        ("max_pool2d", lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
        ("max_pool2d_with_indices", lambda x: F.max_pool2d_with_indices(x, 2)[0]),
        ("max_pool2d", lambda x: nn.MaxPool2d(2, return_indices=True)(x)[0]),
        ("max_unpool2d", lambda x: F.max_unpool2d(x, torch.zeros(1, 4, 8, 8).long(), 2)),
        ("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, output_size=3)),
    ]
    for mesh in meshes.values():
        for name, call in calls:
            with pytest.raises(UnsupportedSpatialOp, match=name):
                call(shard(torch.rand(1, 4, 8, 8), mesh))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: F.avg_pool2d(x, 2, divisor_override=0), "not be zero"),
        (lambda x: F.max_pool2d(x, 2, 0), "at least 1"),
        (lambda x: F.avg_pool2d(x, 2, 1, -1), "at least 0"),
        (lambda x: F.max_pool2d(x, 3, 1, 2), "more than half"),
    ],
)
def test_what_pytorch_refuses_is_refused_on_every_rank(
    call: Operation, sentence: str, meshes: dict
) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 8, 8), mesh)
        with pytest.raises(ValueError, match=sentence):
            call(x)
        with pytest.raises((ValueError, RuntimeError)):
            call(x.full_tensor())


def test_volumes_whose_tiles_are_smaller_than_the_kernel() -> None:
    """PyTorch refuses to pool such a tile by itself, padded or not."""
    for mesh in every_mesh(3).values():
        size = [2 * parts for parts in mesh.grid]
        image = torch.rand(1, 2, *(max(3, n) for n in size), dtype=torch.float64)
        check(lambda x: F.avg_pool3d(x, 3, 1, 1), image, [], mesh, f"3 x 3 x 3 on {mesh.grid}")
