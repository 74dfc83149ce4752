"""SpatialParallel leaves the gradients that average_gradients would."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.optim.swa_utils import AveragedModel

import spatialdl
from spatialdl.comm import agreement, gradients
from spatialdl.models import resnet18


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_equals_average_gradients(
    bucket_bytes: int, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    mesh = spatialdl.init_mesh((1, world.size))
    torch.manual_seed(0)
    plain = resnet18(num_classes=3, width=2).double()
    wrapped = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    for step in range(2):  # the second backward adds to the gradients of the first
        image = torch.randn(2, 3, 25, 35, dtype=torch.float64)
        for model in (plain, wrapped):
            output = model(spatialdl.shard(image, mesh))
            F.cross_entropy(output, torch.tensor([0, step])).backward()
    spatialdl.average_gradients(plain, mesh)
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)
    assert wrapped.state_dict().keys() == plain.state_dict().keys()


class Forked(nn.Module):
    """A layer for even ranks, one for odd ranks, one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.unused = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.odd(x) if rank % 2 else self.even(x)


def test_missing_gradients_count_as_zero_or_stay_none(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((1, 1), data=world.size)
    model = spatialdl.SpatialParallel(Forked(), mesh)
    model(torch.ones(1, 2), world.rank).sum().backward()
    odd_ranks = world.size // 2
    assert model.module.odd.bias.grad.item() == pytest.approx(odd_ranks / world.size)
    assert model.module.even.bias.grad.item() == pytest.approx(1 - odd_ranks / world.size)
    assert model.module.unused.bias.grad is None


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()


def step(model: nn.Module, image: torch.Tensor, rate: float = 0.1) -> None:
    """One of plain gradient descent."""
    model.zero_grad()
    F.cross_entropy(model(image), torch.tensor([0, 2])).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(rate * parameter.grad)


def images(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 17, 13, dtype=torch.float64, generator=draw) for _ in range(count)]


def assert_equal(ours: nn.Module, plain: nn.Module) -> None:
    found, expected = ours.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11, msg=name)


def test_weights_and_buffers_become_those_of_the_first_rank(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "PORTION_BYTES", 24)  # less than a tensor has
    mesh = spatialdl.init_mesh((1, world.size))
    model = small(seed=world.rank).to(memory_format=torch.channels_last)
    model[1].running_mean.add_(world.rank)
    model[1].num_batches_tracked.add_(world.rank)
    wrapped, plain = spatialdl.SpatialParallel(model, mesh), small(seed=0)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_equal(wrapped, plain)
    for image in images(2):
        step(wrapped, spatialdl.shard(image, mesh))
        step(plain, image)
    assert_equal(wrapped, plain)


def test_different_networks_are_refused_on_all_ranks(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((1, world.size))
    model = nn.Linear(2, 3 if world.rank else 2)
    with pytest.raises(ValueError, match=r"networks differ .*: weight is torch\.float32"):
        spatialdl.SpatialParallel(model, mesh)
    with pytest.raises(ValueError, match=r"weight of LazyLinear .* run the network once"):
        spatialdl.SpatialParallel(nn.LazyLinear(2), mesh)


def averaged_model(model: nn.Module) -> nn.Module:
    return AveragedModel(model, use_buffers=True)


def test_averages_of_weights_are_those_of_one_process(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((1, world.size))
    wrapped, plain = spatialdl.SpatialParallel(small(), mesh), small()
    if world.rank == 0:
        averaged_model(wrapped)  # which a rank may do by itself
    ours, expected = averaged_model(wrapped), averaged_model(plain)
    for image in images(3):
        step(wrapped, spatialdl.shard(image, mesh))
        step(plain, image)
        ours.update_parameters(wrapped)
        expected.update_parameters(plain)
    assert_equal(ours, expected)
    fresh = averaged_model(spatialdl.SpatialParallel(small(seed=5), mesh))
    fresh.load_state_dict(expected.state_dict())  # strict
    assert_equal(fresh, expected)
    with torch.no_grad():
        found = fresh.eval()(spatialdl.shard(images(1)[0], mesh))
        torch.testing.assert_close(found, expected.eval()(images(1)[0]), rtol=1e-10, atol=1e-11)


def test_a_deep_copy_can_be_trained_and_what_is_saved_is_the_network_itself(
    world: MPI.Intracomm,
) -> None:
    mesh = spatialdl.init_mesh((1, world.size))
    wrapped = spatialdl.SpatialParallel(small(), mesh)
    copied, expected = copy.deepcopy(wrapped), small()
    for image in images(2):
        step(copied, spatialdl.shard(image, mesh))
        step(expected, image)
    assert_equal(copied, expected)
    for saved in (wrapped, AveragedModel(wrapped)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        network = loaded.module if isinstance(loaded, AveragedModel) else loaded
        assert type(network) is nn.Sequential
        assert_equal(network, small())


def test_parameters_that_are_unfrozen_or_replaced_later_are_averaged(
    world: MPI.Intracomm,
) -> None:
    mesh = spatialdl.init_mesh((1, world.size))
    plain, module = small(), small()
    for model in (plain, module):
        model[0].requires_grad_(False)
    wrapped = spatialdl.SpatialParallel(module, mesh)
    changes = [
        lambda model: None,
        lambda model: model[0].requires_grad_(),
        lambda model: model[5].requires_grad_(False),
        lambda model: model.__setitem__(0, small(seed=7)[0]),
    ]
    for image, change in zip(images(4), changes, strict=True):
        for model in (plain, module):
            change(model)
        step(wrapped, spatialdl.shard(image, mesh))
        step(plain, image)
        assert_equal(wrapped, plain)


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_gradients_that_autograd_returns_are_averaged_model(
    bucket_bytes: int, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    mesh = spatialdl.init_mesh((1, world.size))
    wrapped, plain = spatialdl.SpatialParallel(small(), mesh), small()
    label = torch.tensor([0, 2])
    for image in images(2):
        wrapped.zero_grad()
        ours = F.cross_entropy(wrapped(spatialdl.shard(image, mesh)), label)
        expected = F.cross_entropy(plain(image), label)
        for index in ([0, 3, 5], [4]):
            found = torch.autograd.grad(
                ours, [list(wrapped.parameters())[i] for i in index], retain_graph=True
            )
            wanted = torch.autograd.grad(
                expected, [list(plain.parameters())[i] for i in index], retain_graph=True
            )
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert all(parameter.grad is None for parameter in wrapped.parameters())
        step(wrapped, spatialdl.shard(image, mesh))  # and backward as ever
        step(plain, image)
        assert_equal(wrapped, plain)


def test_gradients_that_autograd_returns_on_some_ranks_only_are_refused(
    world: MPI.Intracomm,
) -> None:
    mesh = spatialdl.init_mesh((1, 1), data=world.size)
    model = spatialdl.SpatialParallel(Forked(), mesh)
    loss = model(torch.ones(1, 2), world.rank).sum()
    with pytest.raises(RuntimeError, match=r"on some ranks only.* call backward\(\)"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_a_backward_that_an_error_has_ended_is_not_forgotten(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((1, 1), data=world.size)
    model = spatialdl.SpatialParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh)
    leaf = torch.ones(1, 2, requires_grad=True)
    leaf.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(leaf).sum().backward()
    with pytest.raises(RuntimeError, match="the last backward raised an error"):
        model(leaf)
