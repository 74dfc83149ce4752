"""A device that PyTorch itself does not have: ``Module.to`` makes new parameters for it."""

from __future__ import annotations

import torch
from torch import nn

from spatialdl.pipeline.moving import moved


def tied() -> nn.Sequential:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(4), second)


def test_shared_parameters_stay_shared():
    assert len({id(p) for p in tied().to("sim").parameters()}) == 6, "or there is nothing to mend"
    model = moved(tied(), torch.device("sim", 0))
    assert model[0].weight is model[2].weight
    assert len(list(model.parameters())) == 5
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {torch.device("sim", 0)}
    model(torch.randn(3, 4, device="sim")).square().sum().backward()
    assert model[0].weight.grad is not None


def fill(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(5)


def test_hooks_and_attributes_stay():
    model = tied()
    model[0].weight.register_hook(lambda grad: torch.full_like(grad, 7))
    model[0].bias.register_post_accumulate_grad_hook(fill)
    model[0].weight.is_special = True
    model[2].requires_grad_(False)
    model = moved(model, torch.device("sim", 0))
    assert model[2].weight.is_special
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, False]
    model[2].weight.requires_grad_()
    model(torch.randn(3, 4, device="sim")).square().sum().backward()
    # of both of its uses; the hook sees their sum
    assert (model[0].weight.grad == 7).all()
    assert (model[0].bias.grad == 5).all()


def test_a_stage_that_is_there_stays_as_it_is():
    model = moved(tied(), torch.device("sim", 0))
    before = list(model.parameters())
    after = list(moved(model, torch.device("sim", 0)).parameters())
    assert all(one is other for one, other in zip(before, after, strict=True))
