from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.dry import Dry
from spatialdl.comm.gradients import Replicated
from spatialdl.comm.single_process import SingleProcess
from spatialdl.pipeline.gradients import Gradients


def on_ranks(*modules: nn.Module, ranks: int = 1) -> Gradients:
    comm = Dry(0, ranks)
    stages = {n: Replicated(one, ("data",), comm, ranks) for n, one in enumerate(modules)}
    return Gradients(stages, {}, SingleProcess())


def stages() -> dict[int, nn.Module]:
    torch.manual_seed(0)
    made = {0: nn.Linear(3, 4).double(), 2: nn.Linear(4, 2).double()}
    for stage in made.values():
        for p in stage.parameters():
            p.grad = torch.randn_like(p)
    made[2].bias.grad = None
    return made


@pytest.mark.parametrize("limit", [0.1, 1.0, 1000.0])
def test_as_pytorch_does_for_a_whole_network(limit):
    ours, plain = stages(), nn.ModuleList(stages().values())
    norm = float(on_ranks(*ours.values()).clip(limit))
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), limit)))
    own = [p.grad for stage in ours.values() for p in stage.parameters()]
    for grad, expected in zip(own, plain.parameters(), strict=True):
        assert (grad is None) == (expected.grad is None)
        assert grad is None or torch.allclose(grad, expected.grad, rtol=1e-12)


def test_a_stage_on_several_ranks_counts_once():
    made = stages()
    alone = float(on_ranks(made[0]).clip(1e9))
    assert float(on_ranks(made[0], ranks=4).clip(1e9)) == pytest.approx(alone / 2)


def test_no_gradients_and_no_numbers():
    layer = nn.Linear(2, 2)
    made = on_ranks(layer)
    assert made.clip(1.0) == 0.0
    assert made.unscale(2.0)
    layer.weight.grad = torch.full((2, 2), math.nan)
    assert math.isnan(made.clip(1.0))
    assert layer.weight.grad.isnan().all()


# --- overflow


def of_gradients(*grads: Tensor) -> Gradients:
    module = nn.ParameterList(torch.zeros_like(grad) for grad in grads)
    for parameter, grad in zip(module, grads, strict=True):
        parameter.grad = grad
    return Gradients({0: Replicated(module, (), SingleProcess(), 1)}, {}, SingleProcess())


@pytest.mark.parametrize("value", [8.0, torch.inf, -torch.inf, torch.nan])
def test_gradients_are_divided_in_place_unless_a_number_is_not_finite(value):
    grads = [torch.full((3, 2), 8.0), torch.ones(5, 5, dtype=torch.float64)]
    grads[1][4, 2] = value
    is_finite = value == 8
    assert of_gradients(*grads).unscale(4.0) == is_finite
    assert torch.equal(grads[0], torch.full((3, 2), 2.0 if is_finite else 8.0))
    assert float(grads[1][0, 0]) == (0.25 if is_finite else 1), "what overflowed is left as it is"
