"""Networks train on the device as on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.simulated_device.networks import NETWORKS, OPTIMISERS, batch, resnet, trained


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_trained_as_on_the_cpu(network, optimiser, delays):
    ours, theirs = (trained(network, optimiser, device) for device in ("sim", "cpu"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_a_training_step_does_not_wait():
    model = resnet().to("sim")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, classes = (x.pin_memory() for x in batch(0, torch.float32))
    for _ in range(2):
        torch.sim.synchronize()
        torch.sim.reset_counters()
        loss = F.cross_entropy(
            model(images.to("sim", non_blocking=True)), classes.to("sim", non_blocking=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.sim.counters().waits == {}
    assert torch.sim.counters().launches > 100


def test_backward_on_the_calling_thread():
    with torch.autograd.set_multithreading_enabled(False):
        x = torch.ones(3, device="sim", requires_grad=True)
        (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_backward_runs_in_the_stream_of_the_forward(delays):
    side = torch.Stream("sim")
    x = torch.ones(3, device="sim", requires_grad=True)
    side.wait_stream(torch.sim.current_stream())
    with side:
        y = (x * 2).exp().sum()
    torch.sim.current_stream().wait_stream(side)
    y.backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.full((3,), 2.0).exp())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_dropout_is_the_same(reentrant):
    x = torch.ones(64, device="sim", requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) * x

    y = checkpoint(dropped, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * y.detach().cpu())
    assert set(y.tolist()) == {0.0, 2.0}
