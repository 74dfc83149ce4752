from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.gradients import Replicated
from spatialdl.comm.single_process import SingleProcess
from spatialdl.pipeline.gradients import Gradients


def gradients(*grads: Tensor) -> Gradients:
    module = nn.ParameterList(torch.zeros_like(grad) for grad in grads)
    for parameter, grad in zip(module, grads, strict=True):
        parameter.grad = grad
    return Gradients({0: Replicated(module, (), SingleProcess(), 1)}, {}, SingleProcess())


def test_gradients_are_divided_in_place():
    grads = [torch.full((3, 2), 8.0), torch.full((1,), -2.0, dtype=torch.float64)]
    assert gradients(*grads).unscale(4.0)
    assert torch.equal(grads[0], torch.full((3, 2), 2.0))
    assert torch.equal(grads[1], torch.full((1,), -0.5, dtype=torch.float64))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_number_that_is_not_finite_is_enough(value):
    grads = [torch.ones(3), torch.ones(5, 5)]
    grads[1][4, 2] = value
    assert not gradients(*grads).unscale(4.0)
    assert torch.equal(grads[0], torch.ones(3)), "what overflowed is left as it is"


def test_a_rank_may_have_no_gradients():
    assert gradients().unscale(2.0)
    assert gradients(torch.empty(0, 3)).unscale(2.0)
