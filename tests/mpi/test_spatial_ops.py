"""Operations on a split image against one process in float64: values, gradients, buffers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, close, draw, mean_over_ranks, parameter, seeds


@pytest.mark.parametrize("seed", seeds(60, 600))
def test_convolution(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes)
    groups = rng.choice((1, 1, 2, 4))
    weight = parameter(rng, 8, 4 // groups, *s.kernel)
    parameters = [weight, parameter(rng, 8)] if rng.random() < 0.5 else [weight]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, s.stride, s.padding, s.dilation, groups)

    check(convolve, s.image, parameters, s.mesh, f"{s}, groups {groups}")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolution_with_padding_by_name(padding: str, seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes)
    kernel = [
        min(k, (n - 1) // d + 1)
        for k, n, d in zip(s.kernel, s.image.shape[2:], s.dilation, strict=True)
    ]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, 1, padding, s.dilation)

    check(convolve, s.image, [parameter(rng, 3, 4, *kernel)], s.mesh, f"{s}, padding {padding}")


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


@pytest.mark.parametrize("seed", seeds(30, 300))
def test_max_pooling(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes, pooling=True)
    stride = rng.choice((None, s.stride))
    ceil_mode = rng.random() < 0.5

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, s.kernel, stride, s.padding, s.dilation, ceil_mode)

    check(pool, s.image, [], s.mesh, f"{s}, stride {stride}, ceil {ceil_mode}")


@pytest.mark.parametrize("seed", seeds(30, 300))
def test_average_pooling(seed: int, meshes: dict) -> None:
    rng = random.Random(seed)
    s = draw(rng, meshes, pooling=True)
    stride = rng.choice((None, s.stride))
    options = (rng.random() < 0.5, rng.random() < 0.5, rng.choice((None, None, 3)))

    def pool(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, s.kernel, stride, s.padding, *options)

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


def batch_norm(norm: nn.BatchNorm2d) -> tuple[Operation, list[Tensor]]:
    """As an operation on (image, weight, bias), with the module's own way of calling it."""
    parameters = [] if norm.weight is None else [norm.weight.detach(), norm.bias.detach()]

    def operation(x: Tensor, *parameters: Tensor) -> Tensor:
        names = dict(zip(("weight", "bias"), parameters, strict=False))
        return torch.func.functional_call(norm, names, (x,))

    return operation, parameters


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.3, "eps": 1e-3},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(13, 9), (4, 4)])
def test_batch_norm(options: dict, training: bool, size: tuple[int, int], meshes: dict) -> None:
    rng = random.Random(3)
    for mesh in meshes.values():
        norm = nn.BatchNorm2d(5, **options).double().train(training)
        for value in list(norm.parameters()) + [b for b in norm.buffers() if b.dim()]:
            value.data.copy_(parameter(rng, 5).abs() + 0.5)
        start = {name: value.clone() for name, value in norm.state_dict().items()}
        images = [3 + 2 * parameter(rng, 2, 5, *size) for _ in range(3)]
        states = []
        for split in (False, True):
            norm.load_state_dict(start)
            with torch.no_grad():
                for image in images:
                    norm(shard(image, mesh) if split else image)
            states.append({name: value.clone() for name, value in norm.state_dict().items()})
        for name, value in states[0].items():
            close(states[1][name].double(), value.double(), f"{name} on {mesh.grid} ")
        operation, parameters = batch_norm(norm)
        check(operation, images[0], parameters, mesh, f"batch_norm {options} on {mesh.grid}")


def test_batch_norm_is_accurate_where_the_mean_is_a_thousand_deviations(meshes: dict) -> None:
    draw = torch.Generator().manual_seed(0)
    image = 1000 + torch.randn(4, 3, 32, 32, generator=draw)
    exact = F.batch_norm(image.double(), None, None, training=True)
    plain = (F.batch_norm(image, None, None, training=True) - exact).abs().max()
    for mesh in meshes.values():
        ours = F.batch_norm(shard(image, mesh), None, None, training=True).full_tensor()
        assert (ours - exact).abs().max() < max(2 * plain, 1e-3)
        variance = torch.zeros(3)
        F.batch_norm(shard(image, mesh), torch.zeros(3), variance, training=True, momentum=1.0)
        torch.testing.assert_close(
            variance.double(), image.double().var((0, 2, 3)), rtol=1e-5, atol=0
        )


def test_batch_norm_where_ranks_have_no_pixels(meshes: dict) -> None:
    rng = random.Random(4)
    weight = parameter(rng, 3, 3, 3, 3)

    def operation(x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        few = F.conv2d(x, weight, None, 5, 1)
        return F.batch_norm(few, None, None, gamma, beta, True)

    for mesh in meshes.values():
        parameters = [weight, parameter(rng, 3), parameter(rng, 3)]
        check(operation, parameter(rng, 3, 3, 6, 6), parameters, mesh, f"on {mesh.grid}")


def test_statistics_of_one_value_are_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        few = F.avg_pool2d(shard(torch.rand(1, 3, 4, 4), mesh), 4)
        with pytest.raises(ValueError, match="more than one value per channel"):
            F.batch_norm(few, None, None, training=True)


REDUCTIONS: dict[str, Operation] = {
    "adaptive_avg_pool2d(1)": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d((1, 1))": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
    "AdaptiveAvgPool2d, flatten": lambda x: nn.AdaptiveAvgPool2d(1)(x).flatten(1),
    "sum": lambda x: x.sum(),
    "torch.sum": torch.sum,
    "mean": lambda x: x.mean(),
    "mean over the image": lambda x: x.mean((2, 3)),
    "mean over the image, negative": lambda x: x.mean(dim=(-1, -2), keepdim=True),
    "sum but channels": lambda x: x.sum((0, 2, 3)),
    "sum of channels": lambda x: x.sum(1, keepdim=True),
    "mean of channels": lambda x: torch.mean(x, (1,), keepdim=True),
    "sum in another type": lambda x: x.sum((2, 3), dtype=torch.float64),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("size", [(11, 7), (4, 4)])
def test_reductions(name: str, size: tuple[int, int], meshes: dict) -> None:
    for mesh in meshes.values():
        image = parameter(random.Random(5), 2, 3, *size)
        check(REDUCTIONS[name], image, [], mesh, f"{name} on {mesh.grid} ")


def test_what_a_reduction_gives_is_whole_and_the_same_everywhere(
    meshes: dict, world: MPI.Intracomm
) -> None:
    for mesh in meshes.values():
        pooled = F.adaptive_avg_pool2d(shard(torch.rand(2, 3, 9, 9) * 0 + 1, mesh), 1)
        assert type(pooled) is Tensor
        assert all(torch.equal(pooled, other) for other in world.allgather(pooled))


def test_three_dim_images_do_not_pass_for_four(meshes: dict) -> None:
    """(N, H, W): the second dim is not the channels."""
    weight = torch.ones(2, 2, 3, 3)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.conv2d(x, weight, padding=1),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
    ]
    for mesh in meshes.values():
        for call in calls:
            with pytest.raises(UnsupportedSpatialOp, match=r"takes \(N, C, H, W\)"):
                call(shard(torch.rand(2, 8, 8), mesh))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: F.conv2d(x, torch.ones(1, 4, 9, 9)), "window is larger than the image"),
        (lambda x: F.conv2d(x, torch.ones(1, 2, 3, 3)), "4 channels, but the weight.*takes 2"),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), padding="valid", stride=8), None),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), padding="round"), "'same', 'valid' or"),
        (lambda x: F.conv2d(x, torch.ones(1, 4, 3, 3), None, 2, "same"), "needs stride 1"),
        (lambda x: F.max_pool2d(x, 9), "window is larger than the image"),
        (lambda x: F.avg_pool2d(x, 3, padding=2), "padding 2 is more than half of the kernel 3"),
        (lambda x: F.batch_norm(x, None, None), "running statistics"),
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
