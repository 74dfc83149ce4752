"""Networks go to the device as they are, and are cast there as PyTorch casts them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.pipeline.stage_runtime import moved
from spatialdl.spatial.autocast import as_autocast, in_float32, padded_as
from spatialdl.training.optimization.precision import precision_of


def test_the_package_casts_what_pytorch_casts():
    x = torch.ones(1, 2, 4, 4, dtype=torch.bfloat16, device="sim")
    plain = [torch.sum, torch.prod, torch.norm, torch.linalg.vector_norm, torch.mean, F.relu]
    along = [torch.logsumexp, torch.cumsum, torch.cumprod]
    calls = [(F.interpolate, {"scale_factor": 2, "mode": "bilinear"})]
    calls += [(one, {}) for one in plain] + [(one, {"dim": 1}) for one in along]
    assert in_float32(x) is x
    with torch.autocast("sim", torch.bfloat16):
        for function, options in calls:
            (cast,), _ = as_autocast(function, (x,), options)
            assert cast.dtype == function(x, **options).dtype, function
        assert in_float32(x).dtype == x.softmax(1).dtype == torch.float32
        assert padded_as(x, "reflect") is x
        assert as_autocast(torch.sum, (x.cpu(),), {})[0][0].dtype == torch.bfloat16


def test_a_precision_that_the_device_does_not_have_is_refused(monkeypatch):
    assert precision_of("bf16-mixed", torch.device("sim", 0)).mixed is torch.bfloat16
    monkeypatch.setattr(torch.sim, "get_amp_supported_dtype", lambda: [torch.float16])
    with pytest.raises(ValueError, match=r"by sim, which has no torch.bfloat16: use fp16-mi"):
        precision_of("bf16-mixed", torch.device("sim", 0))
    assert precision_of("fp16-mixed", torch.device("sim", 0)).mixed is torch.float16


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
