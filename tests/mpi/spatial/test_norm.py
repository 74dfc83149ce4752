"""Normalisation of a split image against one process in float64: values, gradients, buffers."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import init_mesh, shard
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer, Replicated
from spatialdl.layout.layout import even_bounds
from spatialdl.spatial.norm import StatisticsOver
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.replicas import BatchNormOver
from tests.mpi.equality import (
    Operation,
    check,
    check_keyed,
    close,
    parameter,
    some_meshes,
)
from tests.mpi.spatial.shared import Cases, tokens


def as_operation(layer: nn.Module) -> tuple[Operation, list[Tensor]]:
    """A layer as an operation on (image, parameters), with its own way of calling it."""
    names, parameters = (
        zip(*layer.named_parameters(), strict=True) if [*layer.parameters()] else ((), ())
    )

    def operation(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return operation, [value.detach() for value in parameters]


def randomised(layer: nn.Module, rng: random.Random) -> nn.Module:
    """Weights and running statistics away from ones and zeros."""
    for value in [*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())]:
        value.data.copy_(parameter(rng, *value.shape).abs() + 0.5)
    return layer


def compare(layer: nn.Module, images: list[Tensor], meshes: dict, what: str) -> None:
    """Buffers after several images, then value and gradients for the first of them."""
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    plain: dict[str, Tensor] = {}
    for mesh in [None, *meshes.values()]:
        layer.load_state_dict(start)
        with torch.no_grad():
            for image in images:
                layer(image if mesh is None else shard(image, mesh))
        if mesh is None:
            state = layer.state_dict().items()
            plain = {name: value.to(torch.float64, copy=True) for name, value in state}
            continue
        for name, value in layer.state_dict().items():
            close(value.double(), plain[name], f"{what}: {name} on {mesh.grid} ")
    layer.load_state_dict(start)
    operation, parameters = as_operation(layer)
    check(operation, images[0], parameters, meshes, what)


SIZE, SIGNAL, VOLUME = (2, 6, 13, 9), (2, 4, 8), (2, 4, 7, 6, 9)
TRACKED = {"affine": True, "track_running_stats": True, "momentum": 0.7}
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "BatchNorm": (nn.BatchNorm2d(6), SIZE),
    "BatchNorm, one pixel a rank": (nn.BatchNorm2d(6, momentum=0.3, eps=1e-3), (2, 6, 4, 4)),
    "BatchNorm, averages": (nn.BatchNorm2d(6, momentum=None), SIZE),
    "BatchNorm, not tracked": (nn.BatchNorm2d(6, track_running_stats=False), SIZE),
    "BatchNorm3d": (nn.BatchNorm3d(4), VOLUME),
    "GroupNorm": (nn.GroupNorm(3, 6), SIZE),
    "GroupNorm, one group": (nn.GroupNorm(1, 6, eps=1e-2), SIZE),
    "InstanceNorm": (nn.InstanceNorm2d(6), SIZE),
    "InstanceNorm1d": (nn.InstanceNorm1d(4, **TRACKED), SIGNAL),
    "InstanceNorm3d": (nn.InstanceNorm3d(4, **TRACKED), VOLUME),
    "LayerNorm of everything": (nn.LayerNorm((6, 13, 9)), SIZE),
    "LayerNorm of the image": (nn.LayerNorm((13, 9), bias=False), SIZE),
    "RMSNorm of everything": (nn.RMSNorm((6, 13, 9)), SIZE),
}


def compared(layer: nn.Module, name: str, size: tuple[int, ...]) -> None:
    rng = random.Random(7)
    images = [3 + 2 * parameter(rng, *size) for _ in range(2)]
    compare(layer, images, some_meshes(len(size) - 2), name)


EVALUATED = ["BatchNorm", "BatchNorm, not tracked", "BatchNorm3d", "InstanceNorm1d"]


@pytest.mark.parametrize(
    ("name", "training"), [*((n, True) for n in LAYERS), *((n, False) for n in EVALUATED)]
)
def test_layers(name: str, training: bool) -> None:
    layer, size = LAYERS[name]
    norm = randomised(copy.deepcopy(layer).double(), random.Random(3))
    compared(norm.train(training), name, size)


EPS = 0.3


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = torch.linspace(-1, 1, 4).double(), torch.linspace(0.5, 2, 4).double()
    return mean.to(x.device), variance.to(x.device)


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


FUNCTIONS: dict[str, Operation] = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True, eps=EPS),
    "batch_norm of samples and tokens": lambda x, w, b: F.batch_norm(
        last(x).flatten(0, 2), None, None, w, b, True
    ),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b, EPS),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=EPS),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, EPS, False
    ),
    "instance_norm by running statistics": lambda x, w, b: F.instance_norm(
        x, *statistics(x), w, b, False, eps=EPS
    ),
    "instance_norm of tokens": lambda x, w, b: F.instance_norm(x.flatten(2), None, None, w, b),
    "local_response_norm": lambda x, w, b: (
        F.local_response_norm(x, 3, 0.2, 0.5, 2) * w.sum() + b[0]
    ),
    "layer_norm of channels": lambda x, w, b: F.layer_norm(last(x), (4,), w, b, EPS),
    "layer_norm of all tokens": lambda x, w, b: F.layer_norm(
        tokens(x), (63, 4), w.expand(63, 4), b.expand(63, 4)
    ),
    "rms_norm of channels": lambda x, w, b: F.rms_norm(last(x), (4,), w, EPS) + b,
}
PLAIN: dict[str, Operation] = {
    "layer_norm": lambda x, shape: F.layer_norm(x, shape, eps=EPS),
    "torch.layer_norm": lambda x, shape: torch.layer_norm(x, shape, None, None, EPS),
    "rms_norm": lambda x, shape: F.rms_norm(x, shape, None, EPS),
    "torch.rms_norm": lambda x, shape: torch.rms_norm(x, shape, eps=EPS),
    "rms_norm without epsilon": lambda x, shape: F.rms_norm(1e-8 * x, shape),
}


def few(norm: Operation) -> Operation:
    """Where ranks have no pixels."""
    return lambda x, k, w, b: norm(F.conv2d(x, k, None, 5, 1), w, b)


CASES: Cases = {
    **{name: (norm, (2, 4, 9, 7), [(4,), (4,)]) for name, norm in FUNCTIONS.items()},
    **{
        f"{name} of {shape}": (lambda x, f=norm, s=shape: f(x, s), (2, 4, 9, 7), [])
        for name, norm in PLAIN.items()
        for shape in ((4, 9, 7), (9, 7), (7,))[: 3 if name in ("layer_norm", "rms_norm") else 1]
    },
    **{
        f"{name} of few pixels": (few(FUNCTIONS[name]), (3, 4, 6, 6), [(4, 4, 3, 3), (4,), (4,)])
        for name in ("batch_norm", "group_norm", "instance_norm", "local_response_norm")
    },
    "layer_norm of few pixels": (
        few(lambda x, w, b: F.layer_norm(x, (2, 2)) * w.sum() + b.sum()),
        (3, 4, 6, 6),
        [(4, 4, 3, 3), (4,), (4,)],
    ),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_functions(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


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


# --- BatchNorm over replicas is BatchNorm of all their samples together


def network() -> nn.Module:
    """Normalises maps and, at its head, vectors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(4, momentum=None),
        nn.Linear(4, 2),
    ).double()


def images(samples: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 7, 5, dtype=torch.float64, generator=draw)


def assert_as_plain(ours: nn.Module, plain: nn.Module, comm: Communicator, copies: int) -> None:
    Reducer([Replicated(ours, ("data",), comm, copies)]).reduce()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)


def called(model: nn.Module, x: Tensor, way: str) -> Tensor:
    if way == "plain":
        return model(x)
    if way == "recompute":
        return recompute(model, x, modules=[model])
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize(("way", "extra"), [("plain", 0), ("recompute", 1), ("checkpoint", 1)])
def test_replicas_have_the_statistics_of_all_samples(
    way: str, extra: int, world: Communicator
) -> None:
    plain, ours = network(), network()
    samples = 2 * world.size + extra  # replicas of different sizes too
    x, bounds = images(samples), even_bounds(samples, world.size)
    # PyTorch's checkpoint counts a batch twice in running statistics, in one process as here
    called(plain, x, "checkpoint" if way == "checkpoint" else "plain").square().sum().backward()
    own = x[bounds[world.rank] : bounds[world.rank + 1]]
    with BatchNormOver(world):
        (called(ours, own, way).square().sum() * world.size).backward()
    assert_as_plain(ours, plain, world, world.size)


@pytest.mark.world(4)
def test_replicas_of_split_images(world: Communicator) -> None:
    """Behind the pooling two ranks hold the same vectors, which once counted twice."""
    mesh = init_mesh((2, 1), data=2)
    plain, ours = network(), network()
    x = images(5)
    plain(x).square().sum().backward()
    with BatchNormOver(mesh.comm, parts=2):
        y = ours(shard(x[:2] if mesh.replica == 0 else x[2:], mesh))
        (y.square().sum() * 2).backward()
    assert_as_plain(ours, plain, mesh.comm, mesh.size)


def test_one_sample_a_replica_is_enough(world: Communicator) -> None:
    """By itself PyTorch refuses one value a channel."""
    norm, whole = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x = images(world.size)[:, :, 0, 0]
    with BatchNormOver(world):
        ours = norm(x[world.rank : world.rank + 1])
    torch.testing.assert_close(ours, whole(x)[world.rank : world.rank + 1])
    alone = world.subset([world.rank])
    with BatchNormOver(alone), pytest.raises(ValueError, match="more than 1 value"):
        norm(x[:1])


def test_it_ends_where_it_ends_and_evaluation_is_as_it_was(world: Communicator) -> None:
    norm = network()[1]
    before = copy.deepcopy(norm)
    x = images(4)[:, :1].expand(-1, 4, -1, -1) * (1 + world.rank)
    with BatchNormOver(world):
        with BatchNormOver(world):
            assert StatisticsOver.comm is world
        assert StatisticsOver.comm is world
        torch.testing.assert_close(norm.eval()(x), before.eval()(x), rtol=0, atol=0)
    assert StatisticsOver.comm is None
