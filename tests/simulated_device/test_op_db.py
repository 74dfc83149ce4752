"""PyTorch's own samples of its operators give the CPU's numbers and gradients on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("expecttest", reason="PyTorch's operator database imports it")
from tests.operator_database import invocations

pytestmark = pytest.mark.slow

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


def has_dropout(args: tuple[Any, ...]) -> bool:
    """Attention's, which the name does not say."""
    return any(isinstance(value, float) and value == 0.5 for value in args)


def results(op: Any, args: Any, kwargs: Any) -> list[Tensor | None]:
    """What an operator returns, and the gradients of all that it takes."""
    returned = tensors(op.op(*args, **kwargs))
    found: list[Tensor | None] = [y.detach() for y in returned]
    wanted = [x for x in tensors((args, kwargs)) if x.requires_grad]
    total = sum(((y.abs() if y.is_complex() else y).sin().sum() for y in returned if y.grad_fn), 0)
    if wanted and isinstance(total, Tensor):
        found += torch.autograd.grad(total, wanted, allow_unused=True)
    return found


@pytest.mark.parametrize(
    "op", filter(is_sampled, invocations.op_db), ids=lambda op: op.formatted_name
)
@pytest.mark.filterwarnings("ignore")
def test_samples(op):
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd))
    for sample in samples[:MOST]:
        kwargs = sample.kwargs
        if kwargs.get("dropout_p") or has_dropout(sample.args):
            continue
        args = (sample.input, *sample.args)
        there = {name: "sim" if name == "device" else value for name, value in kwargs.items()}
        theirs = results(op, args, kwargs)
        ours = results(op, tree_map(moved, args), tree_map(moved, there))
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and not (one.dtype == other.dtype and one.numel() == 0):
                torch.testing.assert_close(
                    one.cpu(), other, rtol=1e-7, atol=1e-7, equal_nan=True, check_stride=False
                )
