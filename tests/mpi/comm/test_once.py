"""Second derivatives of a split image are refused, never taken for zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, init_mesh, shard
from spatialdl.comm.communicator import Communicator

pytestmark = pytest.mark.world(2, 3, 4)


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
