"""Networks train on the device as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.models import resnet18, unet, vit
from spatialdl.pipeline.stage_runtime import moved
from spatialdl.spatial.autocast import as_autocast, in_float32, padded_as
from spatialdl.training.optimization.precision import precision_of


class Mean(nn.Module):
    """Of what a network gives to every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": partial(resnet18, 4, width=4),
    "U-Net": lambda: nn.Sequential(unet(4, width=4, depth=2), Mean()),
    "ViT": partial(vit, 4, patch=8, width=16, depth=2, heads=2),
}

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.01),
}


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images (2, 3, 32, 32) and classes of a step."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 32, 32, dtype=dtype, generator=draw), torch.tensor([step % 4, 1])


def trained(network: str, optimiser: str, device: str, steps: int = 3) -> dict[str, Tensor]:
    """Losses of a few steps in float64, and the weights, gradients and buffers after them."""
    torch.manual_seed(0)
    model = NETWORKS[network]().double().to(device)
    optimizer = OPTIMISERS[optimiser](model.parameters())
    found: dict[str, Tensor] = {}
    for step in range(steps):
        images, classes = (x.to(device, non_blocking=True) for x in batch(step))
        optimizer.zero_grad()
        found[f"loss {step}"] = F.cross_entropy(model(images), classes)
        found[f"loss {step}"].backward()
        optimizer.step()
    found |= {f"gradient of {name}": x.grad for name, x in model.named_parameters()}
    return {name: x.detach().cpu() for name, x in (found | model.state_dict()).items()}


@pytest.mark.parametrize(
    ("network", "optimiser"), [("ResNet", "SGD"), ("U-Net", "AdamW"), ("ViT", "AdamW")]
)
def test_trained_as_on_the_cpu(network, optimiser, delays):
    ours, theirs = (trained(network, optimiser, device) for device in ("sim", "cpu"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_a_training_step_does_not_wait():
    model = NETWORKS["ResNet"]().to("sim")
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


@pytest.mark.parametrize(
    ("network", "dtype"), [("U-Net", torch.float16), ("ViT", torch.bfloat16)], ids=str
)
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


DRAWS = {
    "rand": lambda: torch.rand(50, device="sim"),
    "randn": lambda: torch.randn(50, device="sim"),
    "exponential": lambda: torch.empty(50, device="sim").exponential_(),
    "dropout": lambda: F.dropout(torch.ones(50, device="sim")),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_same_numbers(name):
    found = []
    for delay in (0, 500):
        torch.sim.set_delay(delay)
        torch.manual_seed(3)
        found += [DRAWS[name]().cpu() for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_states_are_kept_and_restored():
    states = torch.sim.get_rng_state_all()
    x = torch.rand(5, device="sim:1")
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(5, device="sim:1"), x)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        y = torch.rand(5, device="sim")
    assert torch.equal(torch.rand(5, device="sim"), y)


def test_generators():
    first, second = (torch.Generator("sim").manual_seed(5) for _ in range(2))
    x = torch.rand(5, device="sim", generator=first)
    assert torch.equal(torch.rand(5, device="sim", generator=second), x)
    assert first.initial_seed() == 5
    second.set_state(first.get_state())
    assert torch.equal(
        torch.rand(5, device="sim", generator=second), torch.rand(5, device="sim", generator=first)
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(5, device="sim", generator=torch.Generator())


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
