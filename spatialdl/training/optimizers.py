"""Optimizers and learning-rate rules from a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, open_dict
from torch import nn
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
        settings: what the optimizer takes, and ``scale_lr``, a key of `SCALES`: how `lr` follows
            the batch, with ``base_batch``, the batch for which it was found.
        parameters: may be none at all; those that are frozen are left out.
        batch_size: images of a global batch.

    Raises:
        ValueError: if it cannot be made.
    """
    settings = settings.copy()
    with open_dict(settings):
        scale, base = settings.pop("scale_lr", "none"), settings.pop("base_batch", 1)
    if scale not in SCALES:
        raise ValueError(f"optimizer.scale_lr={scale} is unknown: take one of {', '.join(SCALES)}")
    if not isinstance(base, int) or base < 1:
        raise ValueError(f"optimizer.base_batch={base} must be at least 1 image")
    if scale != "none":
        if "lr" not in settings:
            raise ValueError(f"optimizer.scale_lr={scale} needs optimizer.lr, which is not there")
        settings.lr = settings.lr * SCALES[scale](batch_size / base)
    # a stage may have nothing to learn, PyTorch's optimizers refuse that
    trained = [one for one in parameters if one.requires_grad] or [nn.Parameter(torch.empty(0))]
    try:
        optimizer: torch.optim.Optimizer = hydra.utils.instantiate(settings)(trained)
    except (TypeError, hydra.errors.InstantiationException) as error:
        raise ValueError(f"the optimizer cannot be made: {error}") from error
    return optimizer


def make_scheduler(
    settings: DictConfig, optimizer: torch.optim.Optimizer, steps: int
) -> LRScheduler:
    """The learning-rate rule that a configuration names; to be stepped once a step.

    Args:
        settings: what the rule takes, where ``T_max=null`` stands for all steps after the warm-up,
            and ``warmup_steps``, in which the learning rate rises in equal steps to the first of
            the rule.
        steps: of the whole run.

    Raises:
        ValueError: if the warm-up takes the whole run.
    """
    settings = settings.copy()
    with open_dict(settings):
        warm_up: Any = settings.pop("warmup_steps", 0)
    if not isinstance(warm_up, int) or not 0 <= warm_up < steps:
        raise ValueError(
            f"scheduler.warmup_steps={warm_up} must lie between 0 and the run's {steps} steps less "
            "one"
        )
    if "T_max" in settings and settings.T_max is None:
        settings.T_max = steps - warm_up
    rule: LRScheduler = hydra.utils.instantiate(settings)(optimizer)
    if warm_up == 0:
        return rule
    rising = LinearLR(optimizer, 1 / (warm_up + 1), total_iters=warm_up)
    return SequentialLR(optimizer, [rising, rule], [warm_up])
