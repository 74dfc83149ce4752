"""Operators give the CPU's numbers on the device, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

IMAGE = (2, 4, 9, 10)
VOLUME = (1, 2, 5, 6, 7)
LABELS = torch.arange(2 * 9 * 10).view(2, 9, 10) % 4

Function = Callable[[Tensor], Tensor]


def weights(*size: int) -> Tensor:
    """Numbers that do not depend on what was drawn before."""
    count = torch.Size(size).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).view(size)


def like(x: Tensor, *size: int) -> Tensor:
    return weights(*size).to(x.device)


ON_IMAGES: dict[str, Function] = {
    "conv": lambda x: F.conv2d(x, like(x, 6, 4, 3, 3), like(x, 6), 2, 1),
    "conv, groups and dilation": lambda x: F.conv2d(x, like(x, 4, 2, 3, 3), None, 1, 2, 2, 2),
    "transposed conv, groups": lambda x: F.conv_transpose2d(
        x, like(x, 4, 3, 3, 3), None, 2, 1, 1, groups=2
    ),
    "conv1d": lambda x: F.conv1d(x.flatten(2), like(x, 6, 4, 3)),
    "batch norm": lambda x: F.batch_norm(x, None, None, like(x, 4), like(x, 4), True),
    "group norm": lambda x: F.group_norm(x, 2, like(x, 4), like(x, 4)),
    "max unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "adaptive avg pool": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "bilinear, antialias": lambda x: F.interpolate(x, (5, 7), mode="bilinear", antialias=True),
    "unfold and fold": lambda x: F.fold(F.unfold(x, 3), (9, 10), 3),
    "in place": lambda x: (x * 1).add_(1).mul_(like(x, 10)).relu_(),
    "index on the host": lambda x: x[:, torch.tensor([2, 0])],
    "mask": lambda x: x[x > 0],
    "scatter add": lambda x: x.scatter_add(1, LABELS.to(x.device)[:, None], x[:, :1] * 2),
    "channels last": lambda x: F.relu(x.to(memory_format=torch.channels_last)),
    "linear on tokens": lambda x: F.linear(x.flatten(2).mT, like(x, 3, 4), like(x, 3)),
    "attention, mask": lambda x: F.scaled_dot_product_attention(x, x, x, like(x, 9, 9)),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "cross entropy": lambda x: F.cross_entropy(
        x, LABELS.to(x.device), like(x, 4) + 2, ignore_index=1, label_smoothing=0.1
    ),
    "fft": lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 99 * torch.eye(9).to(x)),
}
ON_VOLUMES: dict[str, Function] = {
    "conv": lambda x: F.conv3d(x, like(x, 3, 2, 3, 3, 3), like(x, 3), 2, 1),
    "transposed conv": lambda x: F.conv_transpose3d(x, like(x, 2, 3, 2, 2, 2), None, 2),
    "max pool": lambda x: F.max_pool3d(x, 2),
    "trilinear": lambda x: F.interpolate(x, (7, 3, 9), mode="trilinear"),
    "pad, replicate": lambda x: F.pad(x, (1, 2, 2, 1, 1, 1), mode="replicate"),
}
CASES = [(one, IMAGE) for one in ON_IMAGES.values()] + [
    (one, VOLUME) for one in ON_VOLUMES.values()
]


def result_and_gradient(function: Function, size: tuple[int, ...], device: str) -> list[Tensor]:
    x = (weights(*size) * 3.3).sin().to(device).requires_grad_()
    y = function(x)
    (y * like(y, *y.shape)).sum().backward()
    assert y.device.type == x.grad.device.type == device
    return [y.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize(("function", "size"), CASES, ids=[*ON_IMAGES, *ON_VOLUMES])
def test_operators_of_networks(function, size, delays):
    ours, theirs = (result_and_gradient(function, size, device) for device in ("sim", "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


NEW = {
    "full": lambda device: torch.full((2, 3), 7, device=device),
    "arange": lambda device: torch.arange(2, 9, 2, device=device),
    "nonzero": lambda device: torch.arange(5, device=device).remainder(2).nonzero(),
    "unique": lambda device: (
        torch.arange(9, device=device).remainder(4).unique(return_counts=True)[1]
    ),
    "promotion": lambda device: torch.arange(4, device=device) / 2 + torch.tensor(1.5),
    "out": lambda device: torch.add(
        torch.ones(3, device=device), 1, out=torch.empty(0, device=device)
    ),
    "nonzero, out": lambda device: torch.nonzero(
        torch.ones(3, device=device), out=torch.empty(0, dtype=torch.long, device=device)
    ),
    "complex": lambda device: torch.view_as_complex(torch.ones(3, 2, device=device)).conj() * 2j,
}


@pytest.mark.parametrize("name", NEW)
def test_new_tensors(name):
    ours, theirs = NEW[name]("sim"), NEW[name]("cpu")
    assert (ours.device, ours.dtype) == (torch.device("sim:0"), theirs.dtype)
    assert torch.equal(ours.cpu(), theirs)


def test_attention_with_its_logsumexp():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    x = weights(1, 2, 8, 4)
    ours, theirs = attention(*[x.to("sim")] * 3), attention(x, x, x)
    for one, other in zip(ours, theirs, strict=True):
        assert one.device == torch.device("sim:0")
        assert torch.equal(one.cpu(), other)


def test_what_is_asked_of_numbers():
    x = torch.ones(3, device="sim")
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert bool((x == 1).all())
    assert int(x.sum()) == 3
    assert "device='sim:0'" in repr(x)


def test_what_the_device_cannot_do_is_refused_or_waits_and_is_listed():
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="sim") + torch.ones(4, device="sim")
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.eye(3, device="sim").to_sparse() + 1
    library = torch.library.Library("simtest", "DEF")
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="simtest::nowhere is not implemented for sim"):
        torch.ops.simtest.nowhere(torch.ones(3, device="sim"))
    torch.sim.reset_counters()
    found = torch.histogram(torch.linspace(0, 1, 9, device="sim"), 3)[0]
    assert found.tolist() == torch.histogram(torch.linspace(0, 1, 9), 3)[0].tolist()
    assert "aten::histogram.bin_ct" in torch.sim.synchronous_operators()
    assert torch.sim.counters().waits[("no shape on Meta", "aten::histogram.bin_ct")] == 1


# --- samples of PyTorch's own database of operators

pytest.importorskip("expecttest", reason="PyTorch's operator database imports it")
from tests.operator_database import invocations  # noqa: E402

MOST = 6  # samples of an operator
RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "exponential", "cauchy")
RANDOM += ("geometric", "uniform", "rrelu", "gumbel", "fractional", "empty")
NOT_HERE = ("sparse", "nested", "jiterator", "_refs", "resize_", "embedding_bag")
BY_NAME = {
    "native_batch_norm",  # unused results are empty on the CPU, and not on a GPU
    "_native_batch_norm_legit",
    "tensor_split",  # takes its places from the CPU
    "to",  # to the CPU without waiting
}


def is_sampled(op: Any) -> bool:
    elsewhere = op.name in BY_NAME or any(name in op.name for name in RANDOM + NOT_HERE)
    views_of_more = op.variant_test_name == "partial_views"  # than a copy brings along
    return torch.float64 in op.dtypes and not elsewhere and not views_of_more


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("sim").requires_grad_(value.requires_grad)
    return value


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def has_dropout(sample: Any) -> bool:
    """Also attention's, which the name does not say."""
    halves = [value for value in sample.args if isinstance(value, float) and value == 0.5]
    return bool(sample.kwargs.get("dropout_p") or halves)


def results(op: Any, args: Any, kwargs: Any) -> list[Tensor | None]:
    """What an operator returns, and the gradients of all that it takes."""
    returned = tensors(op.op(*args, **kwargs))
    found: list[Tensor | None] = [y.detach() for y in returned]
    wanted = [x for x in tensors((args, kwargs)) if x.requires_grad]
    total = sum(((y.abs() if y.is_complex() else y).sin().sum() for y in returned if y.grad_fn), 0)
    if wanted and isinstance(total, Tensor):
        found += torch.autograd.grad(total, wanted, allow_unused=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", [*filter(is_sampled, invocations.op_db)], ids=lambda op: op.formatted_name
)
@pytest.mark.filterwarnings("ignore")
def test_samples(op):
    samples = list(op.sample_inputs_func(op, "cpu", torch.float64, op.supports_autograd))
    for sample in samples[:MOST]:
        if has_dropout(sample):
            continue
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        there = {name: "sim" if name == "device" else value for name, value in kwargs.items()}
        theirs = results(op, args, kwargs)
        ours = results(op, tree_map(moved, args), tree_map(moved, there))
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and not (one.dtype == other.dtype and one.numel() == 0):
                torch.testing.assert_close(
                    one.cpu(), other, rtol=1e-7, atol=1e-7, equal_nan=True, check_stride=False
                )
