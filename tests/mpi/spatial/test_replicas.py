"""BatchNorm over replicas is BatchNorm of all their samples together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import init_mesh, shard
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer, Replicated
from spatialdl.parallel.layout import even_bounds
from spatialdl.spatial.norm import StatisticsOver
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.replicas import BatchNormOver


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


def compare(ours: nn.Module, plain: nn.Module, comm: Communicator, copies: int) -> None:
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


@pytest.mark.parametrize("way", ["plain", "recompute", "checkpoint"])
@pytest.mark.parametrize("extra", [0, 1])
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
    compare(ours, plain, world, world.size)


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
    compare(ours, plain, mesh.comm, mesh.size)


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
    torch.testing.assert_close(norm.train()(x), before.train()(x), rtol=0, atol=0)
