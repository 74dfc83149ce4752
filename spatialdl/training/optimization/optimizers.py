"""Optimizers and learning-rate rules from a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

SCALES = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": sqrt,
}
"""What becomes of the learning rate when the batch becomes `ratio` times as large: linear is
Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.1; the square root keeps the variance
of a step, Krizhevsky 2014, section 5."""


def make_optimizer(
    settings: DictConfig, parameters: Iterable[nn.Parameter], batch_size: int
) -> torch.optim.Optimizer:
    """The optimizer that a configuration names.

    Args:
        settings: what the optimizer takes; ``scale_lr``, a key of `SCALES`: how `lr` follows the
            batch, with ``base_batch``, the batch for which it was found; and whether
            ``decay_norms_and_biases``.
        parameters: may be none at all; those that are frozen are left out.
        batch_size: images of a global batch.

    Raises:
        ValueError: if it cannot be made.
    """
    settings = settings.copy()
    with open_dict(settings):
        scale, base = settings.pop("scale_lr", "none"), settings.pop("base_batch", 1)
        decays_all = settings.pop("decay_norms_and_biases", True)
    for key in ("lr", "momentum", "weight_decay"):
        if isinstance(settings.get(key), str | bool):
            raise ValueError(f"optimizer.{key}={settings[key]} must be a number")
    if scale not in SCALES:
        raise ValueError(f"optimizer.scale_lr={scale} is unknown: take one of {', '.join(SCALES)}")
    if not isinstance(base, int) or base < 1:
        raise ValueError(f"optimizer.base_batch={base} must be at least 1 image")
    if scale != "none":
        if "lr" not in settings:
            raise ValueError(f"optimizer.scale_lr={scale} needs optimizer.lr, which is not there")
        settings.lr = settings.lr * SCALES[scale](batch_size / base)
    groups = parameter_groups(parameters, bool(decays_all))
    try:
        optimizer: torch.optim.Optimizer = hydra.utils.instantiate(settings)(groups)
    except (TypeError, ValueError, hydra.errors.InstantiationException) as error:
        raise ValueError(f"the optimizer cannot be made: {error}") from error
    return optimizer


def check_elementwise(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that steps parts of a weight other than the whole of it.

    Tried out on a small weight and its halves: no list of optimizers is complete.

    Raises:
        ValueError: naming it.
    """
    draw = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(6, 4, dtype=torch.float64, generator=draw) for _ in range(4))
    whole = _after_steps(make, start, grads)
    for dim in (0, 1):
        halves = zip(*(one.chunk(2, dim) for one in (start, *grads)), strict=True)
        parts = [_after_steps(make, first, rest) for first, *rest in halves]
        if not torch.allclose(torch.cat(parts, dim), whole, rtol=1e-10, atol=1e-12):
            name = type(make([nn.Parameter(start)])).__name__
            raise ValueError(
                f"optimizer {name} steps a part of a weight other than the whole of it, but "
                "parallel.tensor leaves a part of each on a rank: take sgd, adamw, lars or lamb"
            )


def _after_steps(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    start: Tensor,
    grads: Iterable[Tensor],
) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def state_ratio(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Bytes that an optimizer keeps for each byte of weights."""
    parameter, optimizer = stepped(make, nn.Parameter(torch.zeros(64, 64)))
    kept = [v for state in optimizer.state.values() for v in state.values()]
    large = [v for v in kept if isinstance(v, Tensor) and v.numel() == parameter.numel()]
    return sum(v.nbytes for v in large) / parameter.nbytes


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameter: nn.Parameter
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter and its optimizer, whose state is there after a step."""
    optimizer = make([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return parameter, optimizer


def parameter_groups(
    parameters: Iterable[nn.Parameter], decays_all: bool = True
) -> list[dict[str, Any]]:
    """The groups "decay" and "no_decay" of what learns, on every rank both; either may be empty.

    Norms' weights and all biases have one dim or none, and only they: these do not decay (He et
    al., "Bag of tricks for image classification", 2019, section 3.1) unless all do.
    """
    parameters = [one for one in parameters if one.requires_grad]
    spared = [p for p in parameters if p.dim() <= 1 and not decays_all]
    others = [p for p in parameters if p.dim() > 1 or decays_all]
    return [
        {"name": "decay", "params": others},
        {"name": "no_decay", "params": spared, "weight_decay": 0.0},
    ]


def make_scheduler(
    settings: DictConfig,
    optimizer: torch.optim.Optimizer,
    steps: int,
    steps_per_epoch: int | None = None,
) -> LRScheduler:
    """The learning-rate rule that a configuration names; to be stepped once a step.

    Args:
        settings: what the rule takes, where null stands for what follows from the run, see
            `_lengths`; and ``warmup_steps``, or ``warmup_epochs``, in which the learning rate rises
            in equal steps to the first of the rule.
        steps: of the whole run.
        steps_per_epoch: of which warm-ups in epochs are made.

    Raises:
        ValueError: if the warm-up takes the whole run, or the rule cannot be made.
    """
    settings = settings.copy()
    with open_dict(settings):
        warm_up = _warm_up(settings, steps, steps_per_epoch)
        if "pct_start" in settings:  # a cycle has its own
            if warm_up:
                settings.pct_start = (warm_up + 1) / steps
            warm_up = 0
    rates = [group["lr"] for group in optimizer.param_groups]
    for key, value in _lengths(steps - warm_up).items() | {("max_lr", rates[0])}:
        if key in settings and settings[key] is None:
            settings[key] = value
    try:
        rule: LRScheduler = hydra.utils.instantiate(settings)(optimizer)
    except (TypeError, ValueError, hydra.errors.InstantiationException) as error:
        raise ValueError(f"the scheduler cannot be made: {error}") from error
    if warm_up == 0:
        return rule
    rising = LinearLR(optimizer, 1 / (warm_up + 1), total_iters=warm_up)
    return SequentialLR(optimizer, [rising, rule], [warm_up])


def go_to_step(scheduler: LRScheduler, steps: int) -> None:
    """Bring a new rule to where it is after so many steps.

    A rule is a function of the step: made anew, it follows a configuration that has changed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch wants steps of the optimizer in between
        for _ in range(steps):
            scheduler.step()


def _lengths(steps: int) -> dict[str, int]:
    """What rules call their lengths, for a run of so many steps after the warm-up."""
    third = max(1, -(-steps // 3))
    return {"T_max": steps, "total_iters": steps, "total_steps": steps, "step_size": third}


def _warm_up(settings: DictConfig, steps: int, steps_per_epoch: int | None) -> int:
    """Steps of the warm-up, of which the keys are taken out of `settings`."""
    warm_up, epochs = settings.pop("warmup_steps", 0), settings.pop("warmup_epochs", 0)
    told = f"scheduler.warmup_steps={warm_up}"
    if epochs and warm_up:
        raise ValueError(f"{told} and scheduler.warmup_epochs={epochs}: give one of them")
    if epochs:
        told = f"scheduler.warmup_epochs={epochs}"
        if not isinstance(epochs, int | float) or epochs < 0 or steps_per_epoch is None:
            raise ValueError(f"{told} must be a number of epochs, at least 0")
        warm_up = round(epochs * steps_per_epoch)
        told = f"{told}, {warm_up} steps,"
    if not isinstance(warm_up, int) or not 0 <= warm_up < steps:
        raise ValueError(f"{told} must lie between 0 and the run's {steps} steps less one")
    return warm_up
