"""Updates of slices in any order equal those in sequence, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.forward_buffers import BuffersInOrder, ForwardBuffers
from tests.mpi.sample_networks import averages


def images(slices: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 8, 6, dtype=torch.float64, generator=draw) for _ in range(slices)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return averages().double()


def test_slices_in_another_order_leave_the_buffers_of_one_process() -> None:
    ours, plain = network(), network()
    norms = [layer for layer in ours.modules() if type(layer) is nn.BatchNorm2d]
    buffers = ForwardBuffers(ours, SingleProcess(), norms)
    slices = images(4)
    for _ in range(3):
        for number in (2, 0, 3, 1):
            with buffers.slice(number, counts=True):
                output = ours(slices[number])
            with buffers.slice(number, counts=True):  # layers under a checkpoint run again
                output.sum().backward()
        buffers.fold(4)
        for x in slices:
            plain(x).sum().backward()
    rest = {f"{n}.{b}" for n, m in ours.named_modules() if m in norms for b in m._buffers}
    for name, value in plain.named_buffers():
        if name not in rest:
            torch.testing.assert_close(ours.get_buffer(name), value, rtol=1e-12, atol=1e-12)


class Centred(nn.Module):
    """By what earlier slices had."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return y


class Queue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.mean[:1] = x.detach().mean()
        return x


class Hidden(nn.Module):
    """Writes by an alias."""

    others: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].add_(1)
        return x


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        return x * 2 if float(self.mean[0]) > 3 else x


class Late(nn.Module):
    """Begins to update when it has run a while."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.mean += 1
        return x


class Larger(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, x.detach().mean(0)[:1, 0, 0]])
        return x


def train(model: nn.Module, buffers: ForwardBuffers) -> None:
    for x in images(3):
        with buffers.slice(0, counts=True):
            model(x)
        buffers.fold(1)


REFUSED = [
    (Centred(), "uses its old value in 'sub'"),
    (Queue(), "uses its old value in '__"),
    (Hidden(), "by an alias"),
    (Counting(), "uses its old value in '__"),
    (Late(), "not in the first step"),
    (Larger(), "changes its shape"),
]


@pytest.mark.parametrize(("module", "reason"), REFUSED)
def test_what_is_no_moving_average_is_refused_by_name(module: nn.Module, reason: str) -> None:
    module.register_buffer("mean", torch.zeros(3, 1, 1, dtype=torch.float64))
    model = nn.Sequential(nn.Conv2d(3, 3, 1).double(), module)
    if isinstance(module, Hidden):
        module.others = (module.mean,)
    if isinstance(module, Larger):
        module.mean = torch.zeros(3, dtype=torch.float64)
    buffers = ForwardBuffers(model, SingleProcess(), [])
    kind = type(module).__name__
    with pytest.raises(UnsupportedSpatialOp, match=f"{kind} updates its buffer '1.mean'.*{reason}"):
        train(model, buffers)


def test_a_refusal_leaves_the_buffers_as_they_were() -> None:
    module = Centred()
    module.register_buffer("mean", torch.zeros(3, 1, 1, dtype=torch.float64))
    before = module.mean
    with (
        pytest.raises(UnsupportedSpatialOp),
        ForwardBuffers(module, SingleProcess(), []).slice(0, True),
    ):
        module(images(1)[0])
    assert module.mean is before
    assert not before.any()


def test_buffers_that_rest_cost_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1).double(), Queue())
    model[1].register_buffer("mean", torch.zeros(3))
    model[1].forward = lambda x: x + model[1].mean.view(-1, 1, 1)
    buffers = ForwardBuffers(model, SingleProcess(), [])
    for x in images(2):
        with buffers.slice(0, counts=True):
            model(x)
        buffers.fold(1)
    with buffers.slice(0, counts=True):
        assert torch.overrides._get_current_function_mode() is None


def test_a_buffer_that_backward_updates_out_of_order_is_refused() -> None:
    model, (x, y) = network(), images(2)
    norms = [layer for layer in model.modules() if type(layer) is nn.BatchNorm2d]
    buffers = BuffersInOrder(model, norms)
    with buffers.slice(0, counts=True):
        output = model(x)
    with buffers.slice(1, counts=True):
        model(y)
    what = r"Normalised updates its buffer '6.layers.0.mean' again in backward"
    with pytest.raises(UnsupportedSpatialOp, match=what), buffers.slice(0, counts=True):
        output.sum().backward()
