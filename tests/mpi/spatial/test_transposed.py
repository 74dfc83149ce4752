from __future__ import annotations

import random

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
    mean_over_ranks,
    parameter,
    storage,
)


@in_all_dims(30, 800)
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


def test_images_of_one_pixel_a_rank(meshes: dict) -> None:
    rng = random.Random(0)
    for grid, mesh in meshes.items():
        image = parameter(rng, 1, 2, *grid)
        for kernel, stride, padding, dilation in (
            (2, 2, 0, 1),
            (5, 1, 1, 1),
            (3, 1, 0, 3),
            (1, 4, 0, 1),
            (4, 3, 2, 2),
        ):

            def convolve(
                x: Tensor,
                weight: Tensor,
                bias: Tensor,
                step: tuple[int, int, int] = (stride, padding, dilation),
            ) -> Tensor:
                return F.conv_transpose2d(x, weight, bias, *step[:2], dilation=step[2])

            parameters = [parameter(rng, 2, 3, kernel, kernel), parameter(rng, 3)]
            what = f"{grid}, kernel {kernel}, stride {stride}, {padding}, {dilation}"
            check(convolve, image, parameters, mesh, what)


def test_most_outputs_cut_off_leave_ranks_without_any(meshes: dict) -> None:
    rng = random.Random(1)
    for mesh in meshes.values():
        parameters = [parameter(rng, 2, 2, 3, 3), parameter(rng, 2)]

        def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.conv_transpose2d(x, weight, bias, 1, 4)

        check(convolve, parameter(rng, 2, 2, 7, 7), parameters, mesh, f"on {mesh.grid}")


def test_down_to_ranks_without_pixels_and_up_again(meshes: dict) -> None:
    rng = random.Random(2)
    weights = [parameter(rng, 3, 3, 3, 3) / 3 for _ in range(8)]

    def valley(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights[:4]:
            x = torch.tanh(F.conv2d(x, weight, None, 2, 1))
        for weight in weights[4:]:
            x = torch.tanh(F.conv_transpose2d(x, weight, None, 2, 1, 1))
        return x

    for mesh in meshes.values():
        check(valley, parameter(rng, 2, 3, 21, 17), weights, mesh, f"valley on {mesh.grid}")


def unet(x: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The skip and what meets it."""
    skip = F.conv2d(x, down, padding=1)
    return skip, F.conv_transpose2d(torch.tanh(F.max_pool2d(skip, 2)), up, stride=2)


def test_the_way_up_meets_the_skip_on_its_layout(meshes: dict) -> None:
    rng = random.Random(3)
    parameters = [parameter(rng, 3, 3, 3, 3), parameter(rng, 3, 3, 2, 2)]
    for mesh in meshes.values():
        image = parameter(rng, 1, 3, 24, 48)
        check(lambda *a: torch.mul(*unet(*a)), image, parameters, mesh, f"on {mesh.grid}")
        skip, raised = unet(shard(image, mesh), *parameters)
        assert raised.spatial_layout == skip.spatial_layout


def test_the_module_finds_its_output_padding_from_global_sizes(meshes: dict) -> None:
    rng = random.Random(4)
    torch.manual_seed(0)  # every rank the same layer
    layer = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1).double()
    start = [value.detach() for value in layer.parameters()]
    for mesh in meshes.values():
        for size in ((13, 18), (14, 17)):

            def operation(x: Tensor, *values: Tensor, size: tuple[int, int] = size) -> Tensor:
                names = dict(zip(("weight", "bias"), values, strict=True))
                return torch.func.functional_call(layer, names, (x, list(size)))

            check(operation, parameter(rng, 2, 4, 7, 9), start, mesh, f"{size} on {mesh.grid}")


def test_a_frozen_kernel_and_a_frozen_image(meshes: dict) -> None:
    rng = random.Random(5)
    image, weight = parameter(rng, 1, 2, 12, 12), parameter(rng, 2, 2, 3, 3)
    for mesh in meshes.values():
        check(lambda x: F.conv_transpose2d(x, weight, None, 2, 1), image, [], mesh, "frozen kernel")
        leaf = weight.clone().requires_grad_()
        y = F.conv_transpose2d(shard(image, mesh), leaf, None, 2, 1)
        (ours,) = torch.autograd.grad(y.square().sum(), [leaf])
        plain = weight.clone().requires_grad_()
        loss = F.conv_transpose2d(image, plain, None, 2, 1).square().sum()
        close(mean_over_ranks(ours, mesh), torch.autograd.grad(loss, [plain])[0], "frozen image")


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard: type, meshes: dict) -> None:
    rng = random.Random(6)
    image, weight = parameter(rng, 1, 2, 11, 12), parameter(rng, 2, 2, 3, 3).requires_grad_()
    for mesh in meshes.values():
        with guard():
            ours = F.conv_transpose2d(shard(image, mesh), weight, None, 2)
            assert not ours.requires_grad
            close(ours.full_tensor(), F.conv_transpose2d(image, weight, None, 2), "value")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_other_types_of_numbers(dtype: torch.dtype, meshes: dict) -> None:
    """Whole numbers, so that all are exact."""
    draws = torch.Generator().manual_seed(0)
    image = torch.randint(-3, 4, (2, 4, 11, 13), generator=draws).to(dtype)
    weight = torch.randint(-2, 3, (4, 2, 3, 3), generator=draws).to(dtype)
    for mesh in meshes.values():
        ours = F.conv_transpose2d(shard(image, mesh), weight, None, 2, 1, 1, 2)
        assert ours.dtype == dtype
        assert torch.equal(ours.full_tensor(), F.conv_transpose2d(image, weight, None, 2, 1, 1, 2))


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


def test_autocast_casts_before_tiles_meet(meshes: dict) -> None:
    draws = torch.Generator().manual_seed(2)
    image = torch.randint(-3, 4, (1, 2, 9, 10), generator=draws).float()
    weight = torch.randint(-2, 3, (2, 2, 3, 3), generator=draws).float()
    for mesh in meshes.values():
        grads = []
        for x in (image, shard(image, mesh)):
            leaf = weight.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.conv_transpose2d(x, leaf, None, 2)
                assert y.dtype == torch.bfloat16
            grads += torch.autograd.grad(y.float().sum(), [leaf])
        torch.testing.assert_close(mean_over_ranks(grads[1], mesh), grads[0], rtol=1e-2, atol=1e-2)


def test_channels_last_stays_channels_last(meshes: dict) -> None:
    image = torch.rand(2, 4, 12, 12).to(memory_format=torch.channels_last)
    for mesh in meshes.values():
        x = shard(image, mesh)
        for kernel in (2, 3):
            y = F.conv_transpose2d(x, torch.rand(4, 3, kernel, kernel), None, 2)
            assert y.to_local().is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_backward_keeps_the_tile_and_thin_strips_only(kernel: int, meshes: dict) -> None:
    def raised(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weight, None, 2, kernel // 2)

    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        weight = torch.rand(4, 4, kernel, kernel).requires_grad_()
        kept = kept_for_backward(raised, x, weight)
        assert storage(x.to_local()) in kept
        _, _, height, width = x.to_local().shape
        around = 4 * 2 * kernel * (height + width + 2 * kernel)  # channels x 2 sides x ...
        strips = sum(kept.values()) - x.to_local().nbytes - weight.nbytes
        assert 0 <= strips <= 4 * around
        frozen = kept_for_backward(raised, x, weight.detach())
        assert set(frozen) == {storage(weight)}  # the gradient of the image reads no pixel


def test_where_nobody_talks_nothing_but_the_tile_is_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 24, 36), mesh).requires_grad_()
        weight = torch.rand(4, 4, 2, 2).requires_grad_()
        kept = kept_for_backward(lambda *values: F.conv_transpose2d(*values, None, 2), x, weight)
        assert set(kept) == {storage(x.to_local()), storage(weight)}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 3, 3)), "must be the channels"),
        (lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 3, 3), groups=3), "into 3 groups"),
        (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), torch.ones(3)), r"shape \(2,\)"),
        (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), None, 2, 0, 2), "smaller than"),
        (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), None, 0), "at least 1"),
        (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), None, 1, 6), "less padding"),
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


def test_a_split_kernel_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        kernel = shard(torch.rand(1, 1, 8, 8), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="its weight cannot be a split tensor"):
            F.conv_transpose2d(torch.rand(1, 1, 3, 3), kernel)
