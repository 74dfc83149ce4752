"""Autocast and the gradient scaler."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spatialdl.spatial.autocast import as_autocast, in_float32, padded_as
from spatialdl.training.optimization.precision import precision_of
from tests.simulated_device.networks import NETWORKS, batch

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF)
def test_types_of_results(dtype):
    x = torch.ones(2, 4, 4, 4, device="sim")
    weight = torch.ones(4, 4, 1, 1, device="sim")
    with torch.autocast("sim", dtype):
        assert F.conv2d(x, weight).dtype == dtype
        assert F.linear(x, weight[:, :, 0, 0]).dtype == dtype
        assert (x @ x).dtype == dtype
        assert F.scaled_dot_product_attention(x, x, x).dtype == dtype
        half = x.to(dtype)
        assert half.softmax(1).dtype == torch.float32
        assert half.sum().dtype == torch.float32
        assert half.norm().dtype == torch.float32
        assert F.layer_norm(half, (4,)).dtype == torch.float32
        assert F.mse_loss(half, half).dtype == torch.float32
        assert (half * 2).dtype == dtype
        assert torch.cat([x, half]).dtype == torch.float32
        assert torch.addcmul(x, half, half).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        with torch.autocast("sim", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32
    assert (x.double() @ x.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train(network, dtype, delays):
    torch.manual_seed(0)
    model = NETWORKS[network]().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    images, classes = (x.to("sim") for x in batch(0, torch.float32))
    exact = F.cross_entropy(model(images), classes).item()
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("sim", dtype):
            loss = F.cross_entropy(model(images), classes)
        assert loss.dtype == torch.float32
        if step == 0:
            assert loss.item() == pytest.approx(exact, rel=0.05)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4
    assert all(x.isfinite().all() for x in model.parameters())


def test_an_overflow_is_found_and_the_step_left_out():
    weight = torch.nn.Parameter(torch.ones(3, device="sim"))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1, 1]
    assert scaler.get_scale() == 2


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
