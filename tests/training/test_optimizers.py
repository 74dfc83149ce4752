from __future__ import annotations

import math

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from spatialdl.training.optimizers import make_optimizer, make_scheduler


def settings(target: str, **keys: object) -> DictConfig:
    made = OmegaConf.create({"_target_": target, "_partial_": True, **keys})
    OmegaConf.set_struct(made, True)
    return made


def sgd(**keys: object) -> DictConfig:
    return settings("torch.optim.SGD", lr=0.1, **keys)


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


def test_a_smaller_batch_has_a_lower_rate():
    made = make_optimizer(sgd(scale_lr="linear", base_batch=8), parameters(), batch_size=2)
    assert made.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_stage_may_have_no_parameters():
    make_optimizer(sgd(), [], 4).step()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"scale_lr": "cubic"}, "scale_lr=cubic is unknown: take one of none, linear, sqrt"),
        ({"scale_lr": "linear", "base_batch": 0}, "base_batch=0 must be at least 1"),
        ({"weight": 1}, "the optimizer cannot be made: .*weight"),
    ],
)
def test_what_cannot_be_is_refused(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_optimizer(sgd(**keys), parameters(), 4)


def test_scaling_needs_a_rate():
    adam = settings("torch.optim.AdamW", scale_lr="linear", base_batch=1)
    with pytest.raises(ValueError, match=r"needs optimizer\.lr"):
        make_optimizer(adam, parameters(), 4)


def rates(rule: DictConfig, steps: int) -> list[float]:
    optimizer = make_optimizer(sgd(), parameters(), 4)
    scheduler = make_scheduler(rule, optimizer, steps)
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
    with pytest.raises(ValueError, match=f"warmup_steps={warm_up} must lie between 0 and"):
        rates(rule, 4)


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    made = make_optimizer(sgd(), model.parameters(), 1)
    (group,) = made.param_groups
    assert [one is model.weight for one in group["params"]] == [True]
