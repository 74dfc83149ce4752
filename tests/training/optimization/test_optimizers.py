"""Optimizers and schedules as configurations name them; LARS and LAMB beside their papers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

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


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


class Rows(torch.optim.SGD):
    """Its steps are scaled by the largest number of a row."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.data -= group["lr"] * one.grad / one.grad.abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("target", ["SGD", "AdamW", "NAdam", "RMSprop", "Rprop", "ASGD"])
def test_parts_of_weights_are_stepped_as_the_whole_by_these(target):
    check_elementwise(partial(make_optimizer, settings(f"torch.optim.{target}")))


@pytest.mark.parametrize("target", ["torch.optim.Adafactor", f"{__name__}.Rows"])
def test_what_looks_at_whole_weights_is_refused(target):
    make = partial(make_optimizer, settings(target, lr=0.1))
    with pytest.raises(ValueError, match=r"is not elementwise, .* use sgd"):
        check_elementwise(make)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (sgd(momentum="fast"), "optimizer.momentum=fast must be a number"),
        (sgd(weight=1), "cannot create the optimizer: .*weight"),
    ],
)
def test_what_cannot_be_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_optimizer(given, parameters())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("all_decay", [True, False])
def test_norms_and_biases_may_be_spared_and_what_is_frozen_is_left_out(all_decay):
    model = network()
    model[3].requires_grad_(False)
    given = sgd(weight_decay=0.5, decay_norms_and_biases=all_decay)
    made = make_optimizer(given, model.parameters())
    assert [group["name"] for group in made.param_groups] == ["decay", "no_decay"]
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    assert sum(len(group["params"]) for group in made.param_groups) == 4
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    decay = ("0.weight", "0.bias", "1.weight", "1.bias") if all_decay else ("0.weight",)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] * (0.95 if name in decay else 1.0))


# --- schedules

STEPS = 12
RULES = "torch.optim.lr_scheduler"


def cycle(peak: float) -> list[float]:
    """Smith and Topin 2018, with cosines: up from 0.1 / 5 until step `peak`, then down."""
    low, last, found = 0.1 / 5, 0.1 / 5 / 100, []
    for step in range(STEPS):
        ends = (low, 0.1) if step <= peak else (0.1, last)
        done = step / peak if step <= peak else (step - peak) / (STEPS - 1 - peak)
        found.append(ends[1] + (ends[0] - ends[1]) / 2 * (1 + math.cos(math.pi * done)))
    return found


def cosine(steps: int) -> list[float]:
    return [0.05 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


def polynomial(steps: int, power: float) -> list[float]:
    return [0.1 * (1 - step / steps) ** power for step in range(steps)]


STEP = {"step_size": None}
POWER = {"total_iters": None}
CYCLE = {
    **{"pct_start": 0.5, "max_lr": None, "total_steps": None, "div_factor": 5},
    **{"final_div_factor": 100, "base_momentum": 0.8, "max_momentum": 0.9},
}


def groups_of(
    rule: str, keys: dict[str, object], steps: int, params: Any = None
) -> list[dict[str, Any]]:
    """Those that decay, before each step."""
    params = parameters() if params is None else params
    optimizer = make_optimizer(sgd(momentum=0.5, decay_norms_and_biases=False), params)
    scheduler = make_scheduler(settings(f"{RULES}.{rule}", **keys), optimizer, steps)
    found = []
    for _ in range(steps):
        found.append({**optimizer.param_groups[0], "params": None})
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rule", "keys", "expected"),
    [
        ("CosineAnnealingLR", {"T_max": None, "warmup_steps": 0}, cosine(STEPS)),
        (
            *("CosineAnnealingLR", {"T_max": None, "warmup_steps": 3}),
            [0.025, 0.05, 0.075, *cosine(STEPS - 3)],  # evenly to the first rate of the rule
        ),
        ("ConstantLR", {"factor": 1.0, "warmup_steps": 1}, [0.05, *[0.1] * 11]),
        ("StepLR", {**STEP, "gamma": 0.1}, [0.1 * 0.1 ** (step // 4) for step in range(STEPS)]),
        (
            *("StepLR", {**STEP, "gamma": 0.5, "warmup_steps": 2}),
            [0.1 / 3, 0.2 / 3, *(0.1 * 0.5 ** (step // 4) for step in range(STEPS - 2))],
        ),
        ("PolynomialLR", {**POWER, "power": 0.9}, polynomial(STEPS, 0.9)),
        (
            *("PolynomialLR", {**POWER, "power": 2, "warmup_steps": 3}),
            [0.025, 0.05, 0.075, *polynomial(STEPS - 3, 2)],
        ),
        ("OneCycleLR", CYCLE, cycle(5)),
        ("OneCycleLR", {**CYCLE, "warmup_steps": 3}, cycle(3)),
    ],
)
def test_rules_have_the_steps_of_the_run(rule, keys, expected):
    found = groups_of(rule, keys, STEPS)
    assert [one["lr"] for one in found] == pytest.approx(expected)
    if rule == "OneCycleLR":  # the momentum goes against it
        momenta = [one["momentum"] for one in found]
        assert momenta[expected.index(max(expected))] == pytest.approx(0.8)
        assert momenta[0] == momenta[-1] == pytest.approx(0.9)
    # the same on every stage, of those without norms and those without weights, too
    for others in (network().parameters(), []):
        assert groups_of(rule, keys, STEPS, others) == found


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_of_few_steps(steps):
    keys = {"pct_start": 0.3, "max_lr": None, "total_steps": None}
    assert all(0 <= one["lr"] <= 0.1 for one in groups_of("OneCycleLR", keys, steps))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        *(({"warmup_steps": n}, f"warmup_steps={n} must be at least 0") for n in (-1, 9, "two")),
        ({"fctor": 1}, "cannot create the scheduler: .*fctor"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        groups_of("ConstantLR", keys, 9)


# --- against the algorithms of the papers, restated in NumPy element by element

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


def lars(weight: np.ndarray, number: int, decay: float, *, momentum: float, trust: float) -> Any:
    """Algorithm 1 of You et al. 2017."""
    velocity = np.zeros_like(weight)
    for step in range(UPDATES):
        grad, rate = gradients(step)[number], LR
        norms = np.sqrt((weight**2).sum()), np.sqrt((grad**2).sum())
        if decay and min(norms) > 0:
            rate *= trust * norms[0] / (norms[1] + decay * norms[0] + 1e-8)
        velocity = momentum * velocity + rate * (grad + decay * weight)
        weight = weight - velocity
    return weight


def lamb(weight: np.ndarray, number: int, decay: float, *, betas: Any, eps: float) -> Any:
    """Algorithm 2 of You et al. 2020."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, UPDATES + 1):
        grad = gradients(step - 1)[number]
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        ratio = (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
        whole = ratio + decay * weight
        norms = np.sqrt((weight**2).sum()), np.sqrt((whole**2).sum())
        length = norms[0] / norms[1] if decay and min(norms) > 0 else 1.0
        weight = weight - LR * length * whole
    return weight


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("kind", "plain", "keys"),
    [
        (LARS, lars, {"momentum": 0.0, "trust": TRUST}),
        (LARS, lars, {"momentum": 0.9, "trust": TRUST}),
        (LAMB, lamb, {"betas": (0.5, 0.8), "eps": EPS}),
    ],
)
def test_steps_are_those_of_the_paper(kind, plain, keys, together, monkeypatch):
    if together:  # as on a device: on a CPU parameters are stepped one by one
        monkeypatch.setattr(LayerWise, "_batches", lambda self, some: [some] if some else [])
    found = ours(kind, **keys)
    for number, value in enumerate(start()):
        expected = plain(value, number, 0.0 if number == 1 else DECAY, **keys)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        *((LARS, keys) for keys in ({"lr": -1}, {"momentum": 1.0}, {"trust": float("nan")})),
        *((LAMB, {"betas": (0.9, 1.0)}), (LAMB, {"eps": -1e-8}), (LAMB, {"weight_decay": -0.1})),
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
