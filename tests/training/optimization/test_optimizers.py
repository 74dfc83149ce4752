"""Against the algorithms of the papers, restated in NumPy element by element."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from spatialdl.training.optimization.layer_wise import LAMB, LARS, LayerWise
from spatialdl.training.optimization.optimizers import (
    check_elementwise,
    make_optimizer,
    make_scheduler,
)


def settings(target: str, **keys: object) -> DictConfig:
    made = OmegaConf.create({"_target_": target, "_partial_": True, **keys})
    OmegaConf.set_struct(made, True)
    return made


def sgd(**keys: object) -> DictConfig:
    return settings("torch.optim.SGD", lr=0.1, **keys)


@pytest.mark.parametrize("target", ["SGD", "AdamW", "NAdam", "RMSprop", "Rprop", "ASGD"])
def test_parts_of_weights_are_stepped_as_the_whole_by_these(target):
    check_elementwise(partial(make_optimizer, settings(f"torch.optim.{target}"), batch_size=4))


@pytest.mark.parametrize("target", ["torch.optim.Adafactor", f"{__name__}.Rows"])
def test_what_looks_at_whole_weights_is_refused(target):
    make = partial(make_optimizer, settings(target, lr=0.1), batch_size=4)
    with pytest.raises(ValueError, match=r"is not elementwise, .* use sgd"):
        check_elementwise(make)


class Rows(torch.optim.SGD):
    """Its steps are scaled by the largest number of a row."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.data -= group["lr"] * one.grad / one.grad.abs().amax(-1, keepdim=True)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("scale", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2), (None, 0.1)]
)
def test_the_learning_rate_follows_the_global_batch(scale, rate):
    keys = {} if scale is None else {"scale_lr": scale, "base_batch": 8}
    given = sgd(momentum=0.9, **keys)
    made = make_optimizer(given, parameters(), batch_size=32)
    assert made.param_groups[0]["lr"] == pytest.approx(rate)
    assert made.param_groups[0]["momentum"] == 0.9
    assert given.lr == 0.1  # the configuration, which is kept with the run, stays as it was


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"scale_lr": "cubic"}, "scale_lr=cubic is unknown: use one of none, linear, sqrt"),
        ({"scale_lr": "linear", "base_batch": 0}, "base_batch=0 must be at least 1"),
        ({"momentum": "fast"}, "optimizer.momentum=fast must be a number"),
        ({"weight": 1}, "cannot create the optimizer: .*weight"),
    ],
)
def test_what_cannot_be_is_refused(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_optimizer(sgd(**keys), parameters(), 4)
    adam = settings("torch.optim.AdamW", scale_lr="linear", base_batch=1)
    with pytest.raises(ValueError, match=r"needs optimizer\.lr"):
        make_optimizer(adam, parameters(), 4)


def rates(rule: DictConfig, steps: int, **epochs: int) -> list[float]:
    optimizer = make_optimizer(sgd(), parameters(), 4)
    scheduler = make_scheduler(rule, optimizer, steps, **epochs)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("error")
def test_a_warm_up_rises_evenly_to_the_first_rate_of_the_rule():
    cosine = "torch.optim.lr_scheduler.CosineAnnealingLR"
    ours = rates(settings(cosine, T_max=None, warmup_steps=3), 7)
    falling = [0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert ours == pytest.approx([0.025, 0.05, 0.075, *falling])
    assert rates(settings(cosine, T_max=None, warmup_steps=0), 4) == pytest.approx(falling)
    constant = settings("torch.optim.lr_scheduler.ConstantLR", factor=1.0, warmup_steps=1)
    assert rates(constant, 3) == pytest.approx([0.05, 0.1, 0.1])


@pytest.mark.parametrize("warm_up", [-1, 4, "two"])
def test_a_warm_up_must_end_before_the_run(warm_up):
    rule = settings("torch.optim.lr_scheduler.ConstantLR", warmup_steps=warm_up)
    with pytest.raises(ValueError, match=f"warmup_steps={warm_up} must be at least 0"):
        rates(rule, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(("all_decay", "spared"), [(True, []), (False, ["0.bias", "1.weight"])])
def test_norms_and_biases_may_be_spared(all_decay, spared):
    model = network()
    given = sgd(weight_decay=0.5, decay_norms_and_biases=all_decay)
    made = make_optimizer(given, model.parameters(), 4)
    assert [group["name"] for group in made.param_groups] == ["decay", "no_decay"]
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for name, value in model.named_parameters():
        is_spared = bool(spared) and (name in spared or name.endswith("bias") or name[0] == "1")
        torch.testing.assert_close(value, before[name] * (1.0 if is_spared else 0.95))


def test_groups_are_the_same_on_every_stage():
    stages = [list(network().parameters()), [nn.Parameter(torch.ones(3))], []]
    for rule in ("ConstantLR", "OneCycleLR"):
        keys = {"max_lr": None, "total_steps": None} if rule == "OneCycleLR" else {}
        found = []
        for parameters in stages:
            made = make_optimizer(
                sgd(momentum=0.9, decay_norms_and_biases=False), parameters, batch_size=4
            )
            scheduler = make_scheduler(
                settings(f"torch.optim.lr_scheduler.{rule}", **keys), made, steps=5
            )
            made.step()
            scheduler.step()
            found.append([(g["name"], g["lr"], g["momentum"]) for g in made.param_groups])
        assert found[0] == found[1] == found[2]


STEPS = 12


def rule(name: str, **keys: object) -> list[float]:
    return rates(settings(f"torch.optim.lr_scheduler.{name}", **keys), STEPS)


@pytest.mark.filterwarnings("error")
def test_a_step_rule_falls_by_a_factor():
    assert rule("StepLR", step_size=None, gamma=0.1) == pytest.approx(
        [0.1 * 0.1 ** (step // 4) for step in range(STEPS)]
    )
    found = rule("StepLR", step_size=None, gamma=0.5, warmup_steps=2)
    expected = [0.1 / 3, 0.2 / 3] + [0.1 * 0.5 ** (step // 4) for step in range(STEPS - 2)]
    assert found == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
def test_a_polynomial_falls_to_nothing():
    expected = [0.1 * (1 - step / STEPS) ** 0.9 for step in range(STEPS)]
    assert rule("PolynomialLR", total_iters=None, power=0.9) == pytest.approx(expected)
    falling = [0.1 * (1 - step / 9) ** 2 for step in range(9)]
    found = rule("PolynomialLR", total_iters=None, power=2, warmup_steps=3)
    assert found == pytest.approx([0.025, 0.05, 0.075, *falling])


def cycle(peak: float) -> list[float]:
    """Smith and Topin 2018, with cosines: up from 0.1 / 5 until step `peak`, then down."""
    low, last, found = 0.1 / 5, 0.1 / 5 / 100, []
    for step in range(STEPS):
        ends = (low, 0.1) if step <= peak else (0.1, last)
        done = step / peak if step <= peak else (step - peak) / (STEPS - 1 - peak)
        found.append(ends[1] + (ends[0] - ends[1]) / 2 * (1 + math.cos(math.pi * done)))
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("keys", "peak"), [({"pct_start": 0.5}, 5), ({"warmup_steps": 3}, 3)])
def test_one_cycle_rises_and_falls_and_the_momentum_against_it(keys, peak):
    given = {"pct_start": 0.3, "max_lr": None, "total_steps": None, "div_factor": 5}
    given |= {"final_div_factor": 100, "base_momentum": 0.8, "max_momentum": 0.9, **keys}
    made = make_optimizer(sgd(momentum=0.5), parameters(), 4)
    target = "torch.optim.lr_scheduler.OneCycleLR"
    scheduler = make_scheduler(settings(target, **given), made, STEPS)
    found, momenta = [], []
    for _ in range(STEPS):
        found.append(made.param_groups[0]["lr"])
        momenta.append(made.param_groups[0]["momentum"])
        made.step()
        scheduler.step()
    assert found == pytest.approx(cycle(peak))
    assert momenta[peak] == pytest.approx(0.8)
    assert momenta[0] == momenta[-1] == pytest.approx(0.9)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_of_few_steps(steps):
    keys = {"pct_start": 0.3, "max_lr": None, "total_steps": None}
    found = rates(settings("torch.optim.lr_scheduler.OneCycleLR", **keys), steps)
    assert all(0 <= rate <= 0.1 for rate in found)


def test_a_warm_up_may_be_told_in_epochs():
    constant = settings("torch.optim.lr_scheduler.ConstantLR", factor=1.0, warmup_epochs=1.5)
    found = rates(constant, 9, steps_per_epoch=2)
    assert found == pytest.approx([0.025, 0.05, 0.075, *[0.1] * 6])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"warmup_epochs": 1, "warmup_steps": 1}, "set only one of them"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1 must be a number of epochs"),
        (
            {"warmup_epochs": 5},
            "warmup_epochs=5, 10 steps, must be .* below the run's 9",
        ),
        ({"fctor": 1}, "cannot create the scheduler: .*fctor"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused(keys, sentence):
    made = make_optimizer(sgd(), parameters(), 4)
    given = settings("torch.optim.lr_scheduler.ConstantLR", **keys)
    with pytest.raises(ValueError, match=sentence):
        make_scheduler(given, made, steps=9, steps_per_epoch=2)


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    for all_decay in (True, False):
        made = make_optimizer(sgd(decay_norms_and_biases=all_decay), model.parameters(), 1)
        decay, no_decay = (group["params"] for group in made.param_groups)
        assert [one is model.weight for one in decay] == [True]
        assert no_decay == []


UPDATES = 5
LR, DECAY, TRUST, EPS = 0.3, 0.05, 0.02, 1e-6


def start() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.normal(size=(4, 3)), draw.normal(size=(5,)), np.zeros((2, 2))]


def gradients(step: int) -> list[np.ndarray]:
    draw = np.random.default_rng(100 + step)
    grads = [draw.normal(size=(4, 3)), draw.normal(size=(5,)), draw.normal(size=(2, 2))]
    if step == 2:
        grads[0][:] = 0.0  # no gradient at all, in one step
    return grads


def ours(kind, **settings) -> list[np.ndarray]:
    parameters = [nn.Parameter(torch.from_numpy(value)) for value in start()]
    groups = [
        {"params": [parameters[0], parameters[2]]},
        {"params": [parameters[1]], "weight_decay": 0.0},
        {"params": []},
    ]
    optimizer = kind(groups, lr=LR, weight_decay=DECAY, **settings)
    for step in range(UPDATES):
        for parameter, grad in zip(parameters, gradients(step), strict=True):
            parameter.grad = torch.from_numpy(grad)
        if step == 3:  # in the middle, as from a checkpoint
            state = optimizer.state_dict()
            optimizer = kind(groups, lr=1.0, **settings)
            optimizer.load_state_dict(state)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def lars(weight: np.ndarray, number: int, decay: float, momentum: float) -> np.ndarray:
    """Algorithm 1 of You et al. 2017."""
    velocity = np.zeros_like(weight)
    for step in range(UPDATES):
        grad, rate = gradients(step)[number], LR
        norms = np.sqrt((weight**2).sum()), np.sqrt((grad**2).sum())
        if decay and min(norms) > 0:
            rate *= TRUST * norms[0] / (norms[1] + decay * norms[0] + 1e-8)
        velocity = momentum * velocity + rate * (grad + decay * weight)
        weight = weight - velocity
    return weight


def lamb(weight: np.ndarray, number: int, decay: float, betas: tuple[float, float]) -> np.ndarray:
    """Algorithm 2 of You et al. 2020."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, UPDATES + 1):
        grad = gradients(step - 1)[number]
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        ratio = (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + EPS)
        whole = ratio + decay * weight
        norms = np.sqrt((weight**2).sum()), np.sqrt((whole**2).sum())
        length = norms[0] / norms[1] if decay and min(norms) > 0 else 1.0
        weight = weight - LR * length * whole
    return weight


@pytest.fixture(params=["one by one", "together"])
def as_on_a_device(request, monkeypatch):
    """On a CPU parameters are stepped one by one."""
    if request.param == "together":
        monkeypatch.setattr(LayerWise, "_batches", lambda self, some: [some] if some else [])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.usefixtures("as_on_a_device")
def test_lars_is_that_of_the_paper(momentum):
    found = ours(LARS, momentum=momentum, trust=TRUST)
    for number, value in enumerate(start()):
        expected = lars(value, number, 0.0 if number == 1 else DECAY, momentum)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
@pytest.mark.usefixtures("as_on_a_device")
def test_lamb_is_that_of_the_paper(betas):
    found = ours(LAMB, betas=betas, eps=EPS)
    for number, value in enumerate(start()):
        expected = lamb(value, number, 0.0 if number == 1 else DECAY, betas)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (LARS, {"lr": -1}),
        (LARS, {"momentum": 1.0}),
        (LARS, {"trust": float("nan")}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"eps": -1e-8}),
        (LAMB, {"weight_decay": -0.1}),
    ],
)
def test_numbers_out_of_range_are_refused(kind, keys):
    with pytest.raises(ValueError, match="must be at least 0"):
        kind([nn.Parameter(torch.ones(2))], **keys)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_closure_is_called_with_gradients(kind):
    weight = nn.Parameter(torch.ones(2, 2))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert kind([weight]).step(closure) == 4.0
    assert not torch.equal(weight, torch.ones(2, 2))
