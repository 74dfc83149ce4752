"""Second derivatives of a split image are refused, never taken for zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, average_gradients, init_mesh, shard
from spatialdl.comm import gradients
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import sum_over_ranks

pytestmark = pytest.mark.world(2, 3, 4)

MIXED = [torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float32]


def model_of(*parameters: nn.Parameter) -> nn.Module:
    model = nn.Module()
    for number, parameter in enumerate(parameters):
        model.register_parameter(f"p{number}", parameter)
    return model


def test_none_everywhere_stays_none_and_none_somewhere_is_zero(world: MPI.Intracomm) -> None:
    unused, some, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    if world.rank == 0:
        some.grad = torch.tensor([2.0, 4.0])
    frozen.requires_grad_(False)
    average_gradients(model_of(unused, some, frozen), init_mesh((1, world.size)))
    assert unused.grad is None
    assert frozen.grad is None
    assert torch.equal(some.grad, torch.tensor([2.0, 4.0]) / world.size)


def test_complex_and_conjugated_gradients(world: MPI.Intracomm) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=torch.complex128)) for _ in range(2)]
    values = torch.arange(6.0).view(2, 3) + 1j * world.rank
    parameters[0].grad, parameters[1].grad = (
        values.to(torch.complex128),
        values.to(torch.complex128).mT.conj().mT,
    )
    average_gradients(model_of(*parameters), init_mesh((1, world.size)))
    mean = torch.arange(6.0).view(2, 3) + 0.5j * (world.size - 1)
    for parameter, expected in zip(parameters, (mean, mean.conj()), strict=True):
        torch.testing.assert_close(parameter.grad.resolve_conj(), expected.to(torch.complex128))


def test_what_some_ranks_freeze_is_refused_on_all(world: MPI.Intracomm) -> None:
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    bias.requires_grad_(world.rank > 0)
    weight.grad = torch.ones(2)
    mesh = init_mesh((1, 1), data=world.size)
    if world.size == 1:
        return
    ranks = rf"p1 requires a gradient on {world.size - 1} of the {world.size} ranks .*data"
    with pytest.raises(ValueError, match=ranks):
        average_gradients(model_of(weight, bias), mesh)


def test_several_types_and_memory_formats(world: MPI.Intracomm) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=dtype)) for dtype in MIXED]
    for parameter in parameters:
        grad = torch.arange(120.0).view(2, 3, 4, 5).to(parameter.dtype) * (world.rank * 2)
        parameter.grad = grad.contiguous(memory_format=torch.channels_last)
    average_gradients(model_of(*parameters), init_mesh((world.size, 1)))
    for parameter in parameters:
        assert parameter.grad.dtype == parameter.dtype
        expected = torch.arange(120.0).view(2, 3, 4, 5) * (world.size - 1)
        torch.testing.assert_close(parameter.grad.float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("limit", [1, 100, 2**20])
def test_the_size_of_the_buckets_changes_nothing(
    limit: int, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
    parameters = [nn.Parameter(torch.zeros(count)) for count in (1, 30, 7, 100, 2)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number + world.rank))
    average_gradients(model_of(*parameters), init_mesh((world.size, 1)))
    for number, parameter in enumerate(parameters):
        assert torch.equal(
            parameter.grad, torch.full_like(parameter, number + (world.size - 1) / 2)
        )


def test_half_precision_is_added_up_in_float32(world: MPI.Intracomm) -> None:
    """In bfloat16 256 + 1 is 256."""
    values = torch.tensor([256.0 if world.rank == 0 else 1.0]).bfloat16()
    total = sum_over_ranks(world, values)
    assert total.dtype == torch.bfloat16
    assert total.item() == torch.tensor(256.0 + world.size - 1).bfloat16().item()


@pytest.mark.world(4)
def test_replicas_and_tiles_are_averaged_alike(world: MPI.Intracomm) -> None:
    mesh = init_mesh((2, 1), data=2)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([float(world.rank)])
    average_gradients(model_of(weight), mesh)
    assert weight.grad.item() == 1.5


@pytest.fixture
def mesh(world: Communicator) -> Mesh:
    return init_mesh((world.size, 1))


def image() -> Tensor:
    return torch.randn(2, 3, 16, 9, dtype=torch.float64, requires_grad=True)


SCORES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    # its first gradient is constant: PyTorch's decorator would not notice
    "conv2d": ("sum over ranks", lambda x, weight: F.conv2d(x, weight, padding=1).sum()),
    "relu": ("sum over ranks", lambda x, weight: F.conv2d(x, weight).relu().mean()),
    "max_pool2d": ("repartition", lambda x, _: F.max_pool2d(x, 2).full_tensor().sum()),
    "own tile": ("to tile", lambda x, weight: F.conv2d(x, weight).square().to_local().sum()),
    "pooled": ("sum over ranks", lambda x, _: F.adaptive_avg_pool2d(x.tanh(), 1).sum()),
}


@pytest.mark.parametrize("score", SCORES)
def test_a_gradient_penalty_is_refused_and_says_what_to_do(score: str, mesh: Mesh) -> None:
    operation, compute = SCORES[score]
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    x = shard(image(), mesh)
    said = rf"backward of {operation} with create_graph=True.*second derivatives.*parallel=none"
    with pytest.raises(UnsupportedSpatialOp, match=said):
        torch.autograd.grad(compute(x, weight), x, create_graph=True)


def test_backward_that_records_itself_is_refused(mesh: Mesh) -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(2)).double()
    loss = network(shard(image(), mesh)).square().mean()
    with pytest.raises(UnsupportedSpatialOp, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_first_derivatives_under_enabled_gradients_are_not(mesh: Mesh) -> None:
    whole, weight = image(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    with torch.enable_grad():
        x = shard(whole.detach(), mesh).requires_grad_()
        ours = torch.autograd.grad(F.conv2d(x, weight).square().mean(), x)[0].full_tensor()
        plain = torch.autograd.grad(F.conv2d(whole, weight).square().mean(), whole)[0]
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)


def test_nothing_to_average_is_no_mistake(world: MPI.Intracomm) -> None:
    mesh = init_mesh((world.size, 1))
    average_gradients(nn.ReLU(), mesh)
    average_gradients(model_of(nn.Parameter(torch.ones(2), requires_grad=False)), mesh)
    average_gradients(model_of(nn.Parameter(torch.ones(0))), mesh)
