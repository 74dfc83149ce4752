"""Operations on a split image against one process in float64: values, gradients, buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import (
    CHANNELS_LAST,
    Operation,
    check,
    close,
    draw,
    every_mesh,
    functional,
    in_all_dims,
    mean_over_ranks,
    parameter,
    some_meshes,
)


@in_all_dims(60, 600)
def test_convolution(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    groups = rng.choice((1, 1, 2, 4))
    weight = parameter(rng, 8, 4 // groups, *s.kernel)
    parameters = [weight, parameter(rng, 8)] if rng.random() < 0.5 else [weight]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional("conv", dims)(x, weight, bias, s.stride, s.padding, s.dilation, groups)

    check(convolve, s.image, parameters, s.mesh, f"{s}, groups {groups}")


@in_all_dims(12, 12)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolution_with_padding_by_name(padding: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    kernel = [
        min(k, (n - 1) // d + 1)
        for k, n, d in zip(s.kernel, s.image.shape[2:], s.dilation, strict=True)
    ]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return functional("conv", dims)(x, weight, None, 1, padding, s.dilation)

    check(convolve, s.image, [parameter(rng, 3, 4, *kernel)], s.mesh, f"{s}, padding {padding}")


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_cases_of_distconv(dims: int, kernel: int, mode: str) -> None:
    """Its tests' table: periodic padding, strides, channels last, any dims cut, sizes that divide.

    LLNL's DistConv (https://github.com/LBANN/DistConv), `tests`; networks written for it find here
    what they had there.
    """
    rng = random.Random(kernel)
    for stride in (1, 2):
        module = getattr(torch.nn, f"Conv{dims}d")
        conv = module(4, 8, kernel, stride, kernel // 2, padding_mode=mode, dtype=torch.float64)
        image = parameter(rng, 1, 4, *(16 if dims < 3 else 8,) * dims)
        for last in (None, CHANNELS_LAST.get(dims)):
            if last is not None:
                image, conv = image.contiguous(memory_format=last), conv.to(memory_format=last)

            def convolve(x: Tensor, weight: Tensor, bias: Tensor, conv: Any = conv) -> Tensor:
                return functional_call(conv, {"weight": weight, "bias": bias}, (x,))

            parameters = [conv.weight.detach(), conv.bias.detach()]
            what = f"{mode} {stride} {last}"
            for grid, mesh in some_meshes(dims).items():
                check(convolve, image, parameters, mesh, f"{what} on {grid}")


def test_convolutions_of_one_pixel_a_rank(meshes: dict) -> None:
    """Halos over several neighbours, outputs beyond every tile, strips longer than what is read."""
    rng = random.Random(0)
    for grid, mesh in meshes.items():
        image = parameter(rng, 1, 2, *grid)
        for kernel, padding, dilation in ((2, 2, 3), (3, 3, 2), (5, 2, 1), (1, 3, 1), (4, 6, 1)):

            def convolve(x: Tensor, weight: Tensor, p: int = padding, d: int = dilation) -> Tensor:
                return F.conv2d(x, weight, None, 1, p, d)

            if min(grid) + 2 * padding >= dilation * (kernel - 1) + 1:
                weight = parameter(rng, 2, 2, kernel, kernel)
                check(convolve, image, [weight], mesh, f"{grid} {kernel} {padding} {dilation}")


def test_a_chain_of_strided_convolutions_down_to_one_pixel(meshes: dict) -> None:
    """Ranks run out of pixels one after the other, and stay in the graph."""
    rng = random.Random(1)
    weights = [parameter(rng, 3, 3, 3, 3) / 3 for _ in range(5)]

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(F.conv2d(x, weight, None, 2, 1))
        return x

    for mesh in meshes.values():
        check(chain, parameter(rng, 2, 3, 21, 17), weights, mesh, f"chain on {mesh.grid}")


def test_a_strip_that_reaches_over_the_tile_to_the_other_side(meshes: dict) -> None:
    """The last output is rebalanced: its first rows, on the next rank, read far above its tile."""
    rng = random.Random(7)
    weights = [parameter(rng, 1, 1, 4, 4) for _ in range(5)]

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight, stride in zip(weights, (2, 2, 2, 1, 1), strict=True):
            x = F.conv2d(x, weight, None, stride, 1) / 4
        return x

    for mesh in meshes.values():
        for size in ((70, 93), (93, 70)):
            check(chain, parameter(rng, 2, 1, *size), weights, mesh, f"{size} on {mesh.grid}")


def test_a_frozen_kernel_and_a_frozen_image(meshes: dict) -> None:
    rng = random.Random(2)
    image, weight = parameter(rng, 1, 2, 12, 12), parameter(rng, 2, 2, 3, 3)
    for mesh in meshes.values():
        check(lambda x: F.conv2d(x, weight, None, 1, 1), image, [], mesh, "frozen kernel")
        leaf = weight.clone().requires_grad_()
        y = F.conv2d(shard(image, mesh), leaf, None, 1, 1)
        (ours,) = torch.autograd.grad(y.square().sum(), [leaf])
        plain = weight.clone().requires_grad_()
        loss = F.conv2d(image, plain, None, 1, 1).square().sum()
        close(mean_over_ranks(ours, mesh), torch.autograd.grad(loss, [plain])[0], "frozen image")


def test_three_dim_images_do_not_pass_for_four(meshes: dict) -> None:
    """(N, H, W): the second dim is not the channels."""
    weight = torch.ones(2, 2, 3, 3)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.conv2d(x, weight, padding=1),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
    ]
    for mesh in meshes.values():
        for call in calls:
            with pytest.raises(UnsupportedSpatialOp, match=r"takes \(N, C, H, W\)"):
                call(shard(torch.rand(2, 8, 8), mesh))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: F.conv2d(x, torch.ones(1, 4, 9, 9)), "window is larger than the image"),
        (lambda x: F.conv2d(x, torch.ones(1, 2, 3, 3)), "4 channels, but the weight.*expects 2"),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), padding="valid", stride=8), None),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), padding="round"), "'same', 'valid' or"),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), None, 2, "same"), "needs stride 1"),
        (lambda x: F.max_pool2d(x, 9), "window is larger than the image"),
        (lambda x: F.avg_pool2d(x, 3, padding=2), "padding 2 is more than half of the kernel 3"),
    ],
)
def test_what_pytorch_refuses_is_refused_on_every_rank(
    call: Operation, sentence: str | None, meshes: dict
) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 8, 8), mesh)
        if sentence is None:
            assert call(x).shape == (1, 1, 1, 1)
            continue
        with pytest.raises(ValueError, match=sentence):
            call(x)
        with pytest.raises((ValueError, RuntimeError)):
            call(x.full_tensor())
