"""Normalisation of a split image against one process in float64: values, gradients, buffers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import SpatialTensor, UnsupportedSpatialOp, init_mesh, shard
from spatialdl.comm.single_process import SingleProcess
from tests.mpi.device import DEVICE
from tests.mpi.equality import Operation, check, close, every_mesh, parameter


def as_operation(layer: nn.Module) -> tuple[Operation, list[Tensor]]:
    """A layer as an operation on (image, parameters), with its own way of calling it."""
    names, parameters = zip(*layer.named_parameters(), strict=True) if has_any(layer) else ((), ())

    def operation(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return operation, [value.detach() for value in parameters]


def has_any(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def drawn(layer: nn.Module, rng: random.Random) -> nn.Module:
    """Weights and running statistics away from ones and zeros."""
    for value in [*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())]:
        value.data.copy_(parameter(rng, *value.shape).abs() + 0.5)
    return layer


def compare(layer: nn.Module, images: list[Tensor], meshes: dict, what: str) -> None:
    """Buffers after several images, then value and gradients for the first of them."""
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    for mesh in meshes.values():
        states = []
        for split in (False, True):
            layer.load_state_dict(start)
            with torch.no_grad():
                for image in images:
                    layer(shard(image, mesh) if split else image)
            states.append({name: value.clone() for name, value in layer.state_dict().items()})
        for name, value in states[0].items():
            close(states[1][name].double(), value.double(), f"{what}: {name} on {mesh.grid} ")
        layer.load_state_dict(start)
        operation, parameters = as_operation(layer)
        check(operation, images[0], parameters, mesh, f"{what} on {mesh.grid}")


def images(rng: random.Random, *shape: int, count: int = 1) -> list[Tensor]:
    return [3 + 2 * parameter(rng, *shape) for _ in range(count)]


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
    norm = drawn(nn.BatchNorm2d(5, **options).double(), rng).train(training)
    compare(norm, images(rng, 2, 5, *size, count=3), meshes, f"batch_norm {options}")


def test_batch_norm_of_channels_last(meshes: dict) -> None:
    rng = random.Random(3)
    (image,) = images(rng, 2, 5, 9, 7)
    norm = drawn(nn.BatchNorm2d(5).double(), rng)
    compare(norm, [image.contiguous(memory_format=torch.channels_last)], meshes, "channels last")


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


def test_on_a_grid_of_one_rank_it_is_pytorchs_own() -> None:
    """To the last bit, in float32, where another order of sums would differ."""
    torch.manual_seed(3)
    image, weight = torch.randn(3, 5, 37, 29), torch.randn(5)
    found = []
    for split in (False, True):
        leaf, layer = image.clone().requires_grad_(), nn.BatchNorm2d(5)
        layer.weight.data.copy_(weight)
        mesh = init_mesh(comm=SingleProcess())
        y = layer(shard(leaf, mesh) if split else leaf)
        y.square().sum().backward()
        y = y.full_tensor() if split else y
        found.append([y, leaf.grad, layer.weight.grad, *layer.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_statistics_of_one_value_are_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        few = F.avg_pool2d(shard(torch.rand(1, 3, 4, 4), mesh), 4)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(few, None, None, training=True)
        with pytest.raises(ValueError, match="more than 1 "):
            F.instance_norm(few)


def test_evaluation_without_statistics_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(ValueError, match="running statistics"):
            F.batch_norm(shard(torch.rand(1, 4, 8, 8), mesh), None, None)


def test_what_pytorch_refuses_is_refused(meshes: dict) -> None:
    calls: list[Operation] = [
        lambda x: F.batch_norm(x, None, None, training=True, momentum=None),
        lambda x: F.group_norm(x, 3),
        lambda x: F.layer_norm(x, (3, 3)),
        lambda x: F.rms_norm(x, (3,)),
    ]
    for call in calls:
        with pytest.raises((TypeError, RuntimeError, ValueError)) as plain:
            call(torch.rand(2, 4, 8, 8))
        for mesh in meshes.values():
            with pytest.raises(plain.type):
                call(shard(torch.rand(2, 4, 8, 8), mesh))


LAYERS = {
    "GroupNorm": lambda: nn.GroupNorm(3, 6),
    "GroupNorm, one group": lambda: nn.GroupNorm(1, 6, eps=1e-2),
    "GroupNorm, not affine": lambda: nn.GroupNorm(2, 6, affine=False),
    "InstanceNorm": lambda: nn.InstanceNorm2d(6),
    "InstanceNorm, affine": lambda: nn.InstanceNorm2d(6, affine=True, eps=1e-3),
    "InstanceNorm, tracked": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    "LayerNorm of everything": lambda: nn.LayerNorm((6, 13, 9)),
    "LayerNorm of the image": lambda: nn.LayerNorm((13, 9), bias=False),
    "LayerNorm of columns": lambda: nn.LayerNorm(9),
    "LayerNorm of columns, not affine": lambda: nn.LayerNorm(9, elementwise_affine=False),
    "RMSNorm of everything": lambda: nn.RMSNorm((6, 13, 9)),
    "RMSNorm of columns": lambda: nn.RMSNorm((9,), eps=1e-2),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 2, 3, padding=1)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 4, 1)).eval(),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_layers(name: str, training: bool, meshes: dict) -> None:
    if name == "weight_norm" and DEVICE.type == "cuda":
        pytest.skip("norms of float64 are of float32 in PyTorch's kernel for CUDA")
    rng = random.Random(7)
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    if not name.endswith(("weight_norm", "spectral_norm")):
        drawn(layer, rng).train(training)
    compare(layer, images(rng, 2, 6, 13, 9, count=2), meshes, name)


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm, tracked"])
def test_channels_last(name: str, meshes: dict) -> None:
    rng = random.Random(7)
    layer = drawn(LAYERS[name]().double(), rng)
    (image,) = images(rng, 2, 6, 13, 9)
    compare(layer, [image.contiguous(memory_format=torch.channels_last)], meshes, name)


def test_where_ranks_have_no_pixels(meshes: dict) -> None:
    rng = random.Random(4)
    kernel = parameter(rng, 4, 4, 3, 3)
    operations: list[Operation] = [
        lambda x, k, w, b: F.group_norm(F.conv2d(x, k, None, 5, 1), 2, w, b),
        lambda x, k, w, b: F.instance_norm(F.conv2d(x, k, None, 5, 1), None, None, w, b),
        lambda x, k, w, b: F.layer_norm(F.conv2d(x, k, None, 5, 1), (2, 2)) * w.sum() + b.sum(),
        lambda x, k, w, b: F.local_response_norm(F.conv2d(x, k, None, 5, 1), 2) * w.sum() + b.sum(),
    ]
    for mesh in meshes.values():
        parameters = [kernel, parameter(rng, 4), parameter(rng, 4)]
        for number, operation in enumerate(operations):
            what = f"operation {number} on {mesh.grid}"
            check(operation, parameter(rng, 3, 4, 6, 6), parameters, mesh, what)


FUNCTIONS: dict[str, Operation] = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "torch.batch_norm": lambda x, w, b: torch.batch_norm(
        x, w, b, None, None, True, 0.1, 1e-5, False
    ),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x, 2, w, b),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, 1e-5, False
    ),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (9, 7)) * w.sum() + b.sum(),
    "torch.rms_norm": lambda x, w, b: torch.rms_norm(x, (9, 7)) * w.sum() + b.sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, meshes: dict) -> None:
    rng = random.Random(8)
    for mesh in meshes.values():
        arguments = [parameter(rng, 4), parameter(rng, 4)]
        check(FUNCTIONS[name], parameter(rng, 2, 4, 9, 7), arguments, mesh, f"{name} {mesh.grid}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types(name: str, mixed: bool, dtype: torch.dtype, meshes: dict) -> None:
    rng = random.Random(8)
    whole = parameter(rng, 2, 4, 9, 7)
    arguments = [parameter(rng, 4) for _ in range(2)]
    expected = FUNCTIONS[name](whole, *arguments)
    cast = [value.to(torch.float32 if mixed else dtype) for value in arguments]
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for mesh in meshes.values():
        leaf = whole.to(dtype).requires_grad_()
        ours = FUNCTIONS[name](shard(leaf, mesh), *cast)
        assert ours.dtype == FUNCTIONS[name](whole.to(dtype), *cast).dtype
        torch.testing.assert_close(
            ours.full_tensor().double(), expected, rtol=tolerance, atol=tolerance
        )
        (ours * ours).sum().backward()
        assert leaf.grad.dtype == dtype


def test_what_is_kept_is_what_one_process_keeps(meshes: dict) -> None:
    """The input and a few statistics."""
    rng = random.Random(9)
    weight, bias = parameter(rng, 4).requires_grad_(), parameter(rng, 4).requires_grad_()
    for mesh in meshes.values():
        x = shard(parameter(rng, 2, 4, 32, 32), mesh).requires_grad_()
        tile = x.to_local().numel()
        for name in ("batch_norm", "torch.group_norm", "torch.instance_norm"):
            kept: list[int] = []

            def keep(value: Tensor, kept: list[int] = kept) -> Tensor:
                local = value.to_local() if isinstance(value, SpatialTensor) else value
                kept.append(local.numel())
                return value

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
                FUNCTIONS[name](x, weight, bias)
            assert sum(kept) < tile + 64, name


def test_three_dim_images_do_not_pass_for_four(meshes: dict) -> None:
    """(N, H, W): the second dim is not the channels."""
    calls: list[Operation] = [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
        lambda x: F.group_norm(x, 2),
        F.instance_norm,
        lambda x: F.local_response_norm(x, 2),
    ]
    for mesh in meshes.values():
        for call in calls:
            with pytest.raises(UnsupportedSpatialOp, match=r"takes \(N, C, H, W\)"):
                call(shard(torch.rand(2, 8, 8), mesh))


REARRANGED: dict[str, Operation] = {
    "layer_norm of channels at the end": lambda x, w, b: F.layer_norm(
        x.permute(0, 2, 3, 1), (4,), w, b
    ),
    "layer_norm of tokens": lambda x, w, b: F.layer_norm(x.flatten(2).transpose(1, 2), (4,), w, b),
    "rms_norm of channels at the end": lambda x, w, b: (
        F.rms_norm(x.permute(0, 2, 3, 1), (4,), w) + b
    ),
    "layer_norm of columns and channels": lambda x, w, b: F.layer_norm(
        x.permute(0, 2, 3, 1), (7, 4), w.expand(7, 4), b.expand(7, 4)
    ),
    "layer_norm of all tokens": lambda x, w, b: F.layer_norm(
        x.flatten(2).transpose(1, 2), (63, 4), w.expand(63, 4), b.expand(63, 4)
    ),
    "batch_norm of tokens": lambda x, w, b: F.batch_norm(x.flatten(2), None, None, w, b, True),
    "batch_norm of samples and tokens": lambda x, w, b: F.batch_norm(
        x.permute(0, 2, 3, 1).flatten(0, 2), None, None, w, b, True
    ),
    "group_norm of tokens": lambda x, w, b: F.group_norm(x.flatten(2), 2, w, b),
    "instance_norm of tokens": lambda x, w, b: F.instance_norm(x.flatten(2), None, None, w, b),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_rows_and_columns_at_other_dims(name: str, meshes: dict) -> None:
    rng = random.Random(8)
    for mesh in meshes.values():
        arguments = [parameter(rng, 4), parameter(rng, 4)]
        check(REARRANGED[name], parameter(rng, 2, 4, 9, 7), arguments, mesh, f"{name} {mesh.grid}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int, training: bool) -> None:
    rng = random.Random(dims)
    size = [rng.randint(6, 9) for _ in range(dims)]
    batch, instance = (getattr(nn, f"{name}Norm{dims}d") for name in ("Batch", "Instance"))
    layers = [
        batch(4),
        instance(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm([4, *size]),
        nn.LayerNorm(size[-1]),
    ]
    for layer in layers:
        norm = drawn(layer.double(), rng).train(training)
        compare(norm, images(rng, 2, 4, *size, count=2), every_mesh(dims), str(norm))
