"""Updates of slices in any order equal those in sequence, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.pipeline.affine import Followed
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


# --- affine


Update = Callable[[nn.Module, Tensor], object]


class Holder(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("b", torch.linspace(start, 2 * start + 1, 3, dtype=torch.float64))


def assign(value: Callable[[Tensor, Tensor], Tensor]) -> Update:
    def update(holder: nn.Module, x: Tensor) -> None:
        holder.b = value(holder.b, x.mean(0))

    return update


def set_data(holder: nn.Module, x: Tensor) -> None:
    holder.b.data = 0.25 * holder.b.data - x[1]


def through_an_alias(holder: nn.Module, x: Tensor) -> None:
    holder.b.detach().mul_(0.5)
    holder.b.data.add_(x[0])


def own_temporary(holder: nn.Module, x: Tensor) -> None:
    kept = x[0].clone()
    kept += holder.b
    kept.mul_(0.5)
    holder.b.copy_(kept)


UPDATES: dict[str, Update] = {
    "mul_ add_": lambda h, x: h.b.mul_(0.9).add_(x.mean(0), alpha=0.1),
    "assigned": assign(lambda b, m: 0.9 * b + 0.1 * m),
    "the other way round": assign(lambda b, m: m * 0.1 + b * 0.9),
    "difference": assign(lambda b, m: b - 0.1 * (b - m)),
    "reversed difference": assign(lambda b, m: 1 - b / 4 + m),
    "torch.sub": assign(lambda b, m: torch.sub(m, b, alpha=0.3)),
    "sub_": lambda h, x: h.b.sub_(x[0]).div_(2),
    "lerp": assign(lambda b, m: torch.lerp(b, m, 0.3)),
    "lerp from the other end": assign(lambda b, m: torch.lerp(m, b, 0.3)),
    "addcmul": lambda h, x: h.b.mul_(0.2).addcmul_(x[0], x[1], value=0.8),
    "both sides": assign(lambda b, m: b + 0.5 * b.clone().detach() - m),
    "replaced": assign(lambda b, m: m),
    "copied": lambda h, x: h.b.copy_(x[0]),
    "zeroed": lambda h, x: h.b.zero_().add_(x[0]),
    "data": set_data,
    "alias": through_an_alias,
    "own temporary": own_temporary,
    "float32": assign(lambda b, m: (b.float() * 0.5).double() + m),
    "running mean": lambda h, x: F.batch_norm(
        x, h.b, torch.ones_like(h.b), training=True, momentum=0.3
    ),
    "torch.batch_norm": lambda h, x: torch.batch_norm(
        x, None, None, h.b, torch.ones_like(h.b), True, 0.2, 1e-5, False
    ),
    "instance norm": lambda h, x: F.instance_norm(x.mT[None], h.b, torch.ones_like(h.b)),
    "shape": lambda h, x: h.b.add_(x[0]).view(h.b.shape) if h.b.dim() > 5 else h.b.numel(),
}

USES: dict[str, Update] = {
    "sub": lambda h, x: x - h.b,
    "item": lambda h, x: h.b[0].item(),
    "mul": lambda h, x: h.b.mul_(x[0]),
    "sqrt": lambda h, x: h.b.sqrt_(),
    "__setitem__": lambda h, x: h.b.__setitem__(0, x[0, 0]),
    "clamp_": lambda h, x: h.b.clamp_(max=0.1),
    "lerp": lambda h, x: torch.lerp(h.b, x[0], x[1]),
    "out": lambda h, x: torch.add(h.b, x[0], out=h.b),
    "batch_norm": lambda h, x: F.batch_norm(x, h.b, torch.ones(3).double()),
    "weight": lambda h, x: F.batch_norm(x, None, None, weight=h.b, training=True),
    "int": lambda h, x: h.b.to(torch.int64),
    "learnt": lambda h, x: h.b + x.clone().requires_grad_().mean(0),
    "_foreach_mul_": lambda h, x: torch._foreach_mul_([h.b], 0.9),
    "sum": lambda h, x: h.b.sum(),
    "stack": lambda h, x: torch.stack([h.b, x[0]]),
}


def followed(update: Update, start: float) -> tuple[Tensor, float, dict[int, str]]:
    """The buffer afterwards, its factor, and other uses of it."""
    holder = Holder(start)
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()
    with Followed([holder.b]) as mode:
        update(holder, x)
    part = mode.part(holder.b)
    return holder.b, 0.0 if part is None else part.factor, mode.uses


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_factor_says_what_comes_of_another_start(update: Update) -> None:
    one, factor, uses = followed(update, 0.5)
    other, same, _ = followed(update, -3.0)
    assert not uses
    assert factor == same
    moved = factor * (Holder(-3.0).b - Holder(0.5).b)
    torch.testing.assert_close(other, one + moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("update", USES.values(), ids=USES)
def test_other_uses_are_noted(update: Update) -> None:
    assert followed(update, 0.5)[2]


def test_a_second_run_in_backward_is_followed() -> None:
    holder = Holder(0.5)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            holder.b.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x.sin()

    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    with Followed([holder.b]) as mode:
        y.sum().backward()
    part = mode.part(holder.b)
    assert part is not None
    assert (part.factor, part.written) == (0.9, True)
