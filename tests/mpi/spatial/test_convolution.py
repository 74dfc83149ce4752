"""Convolutions of split images, transposed ones too, against one process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from spatialdl import shard
from tests.mpi.equality import (
    CHANNELS_LAST,
    Operation,
    check,
    check_keyed,
    close,
    draw,
    drawn,
    every_mesh,
    functional,
    in_all_dims,
    mean_over_ranks,
    parameter,
    some_meshes,
)
from tests.mpi.spatial.shared import Cases


@pytest.mark.tiles
@in_all_dims(9, 600)
def test_convolution(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    s = draw(rng, every_mesh(dims))
    groups = rng.choice((1, 1, 2, 4))
    weight = parameter(rng, 8, 4 // groups, *s.kernel)
    parameters = [weight, parameter(rng, 8)] if rng.random() < 0.5 else [weight]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional("conv", dims)(x, weight, bias, s.stride, s.padding, s.dilation, groups)

    check(convolve, s.image, parameters, s.mesh, f"{s}, groups {groups}")


@pytest.mark.tiles
@in_all_dims(1, 12)
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


@pytest.mark.tiles
@in_all_dims(6, 800)
def test_transposed_convolution(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        s = draw(rng, every_mesh(dims))
        extra = [rng.randrange(max(d, n)) for d, n in zip(s.stride, s.dilation, strict=True)]
        size = [
            (n - 1) * step - 2 * p + d * (k - 1) + 1 + more
            for n, step, p, d, k, more in zip(
                s.image.shape[2:], s.stride, s.padding, s.dilation, s.kernel, extra, strict=True
            )
        ]
        if min(size) >= 1:
            break
    groups = rng.choice((1, 1, 2, 4))
    weight = parameter(rng, 4, 6 // min(groups, 2), *s.kernel)
    channels = weight.shape[1] * groups
    parameters = [weight, parameter(rng, channels)] if rng.random() < 0.5 else [weight]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        convolve = functional("conv_transpose", dims)
        return convolve(x, weight, bias, s.stride, s.padding, extra, groups, s.dilation)

    check(convolve, s.image, parameters, s.mesh, f"{s}, output padding {extra}, groups {groups}")


@pytest.mark.tiles
@pytest.mark.parametrize(
    ("kernel", "stride", "mode"), [(1, 2, "zeros"), (3, 2, "circular"), (5, 1, "circular")]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_cases_of_distconv(dims: int, kernel: int, stride: int, mode: str) -> None:
    """Its tests' table: periodic padding, strides, channels last, any dims cut, sizes that divide.

    LLNL's DistConv (https://github.com/LBANN/DistConv), `tests`; networks written for it find here
    what they had there.
    """
    module = getattr(nn, f"Conv{dims}d")
    conv = module(4, 8, kernel, stride, kernel // 2, padding_mode=mode, dtype=torch.float64)
    image = drawn(kernel, 1, 4, *(16 if dims < 3 else 8,) * dims)
    if dims in CHANNELS_LAST:
        image = image.contiguous(memory_format=CHANNELS_LAST[dims])
        conv = conv.to(memory_format=CHANNELS_LAST[dims])

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(conv, {"weight": weight, "bias": bias}, (x,))

    parameters = [conv.weight.detach(), conv.bias.detach()]
    check(convolve, image, parameters, some_meshes(dims), f"{mode} {stride}")


ONE_PIXEL_A_RANK: list[tuple[Operation, int, int, int, int]] = [
    *((F.conv2d, *one) for one in ((2, 1, 2, 3), (3, 1, 3, 2), (5, 1, 2, 1), (4, 1, 6, 1))),
    *((F.conv_transpose2d, *one) for one in ((2, 2, 0, 1), (5, 1, 1, 1), (3, 1, 0, 3))),
    *((F.conv_transpose2d, *one) for one in ((1, 4, 0, 1), (4, 3, 2, 2))),
]


@pytest.mark.tiles
def test_images_of_one_pixel_a_rank() -> None:
    """Halos over several neighbours, outputs beyond every tile, strips longer than what is read."""
    rng = random.Random(0)
    for grid, mesh in every_mesh().items():
        for function, kernel, stride, padding, dilation in ONE_PIXEL_A_RANK:
            what = f"{grid} {function.__name__} {kernel} {stride} {padding} {dilation}"
            options = {"stride": stride, "padding": padding, "dilation": dilation}

            def convolve(
                x: Tensor, w: Tensor, b: Tensor, f: Operation = function, o: dict = options
            ) -> Tensor:
                return f(x, w, b, **o)

            if min(grid) + 2 * padding > dilation * (kernel - 1) or stride > 1 or padding < 2:
                values = [parameter(rng, 2, 2, kernel, kernel), parameter(rng, 2)]
                check(convolve, parameter(rng, 1, 2, *grid), values, mesh, what)


def valley(x: Tensor, *weights: Tensor) -> Tensor:
    """Ranks run out of pixels one after the other, stay in the graph, and get some again."""
    for weight in weights[:5]:
        x = torch.tanh(F.conv2d(x, weight / 3, None, 2, 1))
    for weight in weights[5:]:
        x = torch.tanh(F.conv_transpose2d(x, weight / 3, None, 2, 1, 1))
    return x


def strips_over_tiles(x: Tensor, *weights: Tensor) -> Tensor:
    """The last output is rebalanced: its first rows, on the next rank, read far above its tile."""
    for weight, stride in zip(weights, (2, 2, 2, 1, 1), strict=True):
        x = F.conv2d(x, weight, None, stride, 1) / 4
    return x


def unet(x: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The skip and what meets it."""
    skip = F.conv2d(x, down, padding=1)
    return skip, F.conv_transpose2d(torch.tanh(F.max_pool2d(skip, 2)), up, stride=2)


def of_tokens(groups: int) -> Operation:
    return lambda x, w, b: F.conv1d(x.flatten(2), w[:, :, 0], b, groups=groups)


def few_tokens(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return of_tokens(1)(F.max_pool2d(x, 3), weight, bias)


def in_float64_under_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.conv2d(x, weight, bias)


def large(groups: int = 1, **options: object) -> tuple[Operation, tuple[int, ...], list]:
    """Weights larger than tiles: copying the tile is cheaper than the taps that strips meet."""
    shapes = [(24, 32 // groups, 3, 3), (24,)]
    return lambda x, w, b: F.conv2d(x, w, b, groups=groups, **options), (2, 32, 11, 13), shapes


def sized(rows: int, columns: int) -> Operation:
    """The module finds its output padding from global sizes."""
    layer = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1).double()
    return lambda x, weight, bias: functional_call(
        layer, {"weight": weight, "bias": bias}, (x, [rows, columns])
    )


SMALL, ONE = [(6, 4, 1, 1), (6,)], (2, 3, 9, 11)
CASES: Cases = {
    "valley": (valley, (2, 3, 21, 17), [(3, 3, 3, 3)] * 10),
    "strips over tiles": (strips_over_tiles, (2, 1, 70, 93), [(1, 1, 4, 4)] * 5),
    "most outputs cut off": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 1, 4),
        (2, 2, 7, 7),
        [(2, 2, 3, 3), (2,)],
    ),
    "output size": (sized(13, 18), (2, 4, 7, 9), [(4, 3, 3, 3), (3,)]),
    "up to a skip": (
        lambda *a: torch.mul(*unet(*a)),
        (1, 3, 24, 48),
        [(3, 3, 3, 3), (3, 3, 2, 2)],
    ),
    "tokens, groups": (of_tokens(2), (2, 4, 6, 6), [(6, 2, 1, 1), (6,)]),
    "tokens, ranks without pixels": (few_tokens, (2, 4, 6, 6), SMALL),
    "large, groups": large(2, padding=(0, 1)),
    "large, same": large(padding="same"),
    "written in place": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1).add_(1).mul_(2).relu_(),
        ONE,
        [(4, 3, 3, 3), (4,)],
    ),
    "float64 under autocast": (in_float64_under_autocast, ONE, [(4, 3, 3, 3), (4,)]),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


FROZEN: dict[str, Operation] = {
    "convolution": lambda x, w, b: F.conv2d(x, w, b, padding=1),
    "convolution, ranks without pixels": lambda x, w, b: F.conv2d(F.max_pool2d(x, 3), w, b, 1, 1),
    "transposed": lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1),
}


@pytest.mark.parametrize("name", FROZEN)
def test_any_of_image_weight_and_bias_may_be_frozen(name: str, meshes: dict) -> None:
    convolve, image = FROZEN[name], drawn(5, 1, 4, 4, 4)
    weight, bias = drawn(3, 4, 4, 3, 3), drawn(4, 4)
    check(convolve, image, [weight, bias], meshes, name)
    check(lambda x: convolve(x, weight.to(x.device), bias.to(x.device)), image, [], meshes, name)
    check(lambda x, w: convolve(x, w, bias.to(x.device)), image, [weight], meshes, name)
    for mesh in meshes.values():
        for trained in (0, 1):
            grads = []
            for x in (shard(image, mesh), image):
                leaves = [weight.clone(), bias.clone()]
                leaves[trained].requires_grad_()
                loss = convolve(x, *leaves).square().sum()
                grads += torch.autograd.grad(loss, [leaves[trained]])
            close(*mean_over_ranks(grads[:1], mesh), grads[1], f"{name} on {mesh.grid}: ")


@pytest.fixture
def memory_is_never_clean() -> Iterator[None]:
    """What nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.tiles
@pytest.mark.usefixtures("memory_is_never_clean")
@pytest.mark.parametrize(("stride", "kernel", "more"), [(5, 2, 4), (7, 1, 6), (9, 3, 8)])
def test_gaps_between_pixels_are_the_bias(
    stride: int, kernel: int, more: int, meshes: dict
) -> None:
    """Ranks may have nothing else: one pixel of the image becomes many rows and columns."""

    def spread(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv_transpose2d(F.max_pool2d(x, 4), weight, bias, stride, 0, more)

    check_keyed(spread, (2, 3, 5, 7), [(3, 4, kernel, kernel), (4,)], meshes, "gaps")


def test_complex_numbers(meshes: dict) -> None:
    draws = torch.Generator().manual_seed(1)
    image, weight, bias = (
        torch.randn(*shape, dtype=torch.complex128, generator=draws)
        for shape in ((1, 2, 7, 5), (2, 2, 3, 3), (2,))
    )
    for mesh in meshes.values():
        for stride in (1, 4):  # with stride 4 some outputs read nothing
            values, grads = [], []
            for split in (False, True):
                leaf = image.clone().requires_grad_()
                x = shard(leaf, mesh) if split else leaf
                y = F.conv_transpose2d(x, weight, bias, stride)
                values.append(y.full_tensor() if split else y)
                grads += torch.autograd.grad(values[-1].abs().sum(), [leaf])
            close(values[1], values[0], f"complex on {mesh.grid}: value ")
            close(grads[1], grads[0], f"complex on {mesh.grid}: gradient ")


def test_channels_last_stays_channels_last(meshes: dict) -> None:
    image = torch.rand(2, 4, 12, 12).to(memory_format=torch.channels_last)
    operations: list[Operation] = [
        lambda x: F.conv_transpose2d(x, torch.rand(4, 3, 2, 2), None, 2),
        lambda x: F.conv_transpose2d(x, torch.rand(4, 3, 3, 3), None, 2),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
    ]
    for mesh in meshes.values():
        for operation in operations:
            tile = operation(shard(image, mesh)).to_local()
            assert tile.is_contiguous(memory_format=torch.channels_last)
            assert operation(shard(image.contiguous(), mesh)).to_local().is_contiguous()
