"""Optimizers and learning-rate schedulers from a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from spatialdl.common.configuring.plugins import describe_cause


def make_optimizer(
    settings: DictConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Create the optimizer of a configuration.

    Args:
        settings: arguments of the optimizer, and ``decay_norms_and_biases``.
        parameters: may be empty; frozen parameters are left out.

    Raises:
        ValueError: if it cannot be created.
    """
    settings = settings.copy()
    with open_dict(settings):
        decays_all = settings.pop("decay_norms_and_biases", True)
    for key in ("lr", "momentum", "weight_decay"):
        if isinstance(settings.get(key), str | bool):
            raise ValueError(f"optimizer.{key}={settings[key]} must be a number")
    groups = parameter_groups(parameters, bool(decays_all))
    try:
        optimizer: torch.optim.Optimizer = hydra.utils.instantiate(settings)(groups)
    except (TypeError, ValueError, hydra.errors.InstantiationException) as error:
        raise ValueError(f"cannot create the optimizer: {describe_cause(error)}") from error
    return optimizer


def check_elementwise(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Check that an optimizer is elementwise: equal on parts of a weight and on the whole.

    The check runs it on a small weight and its halves, since no list of optimizers is complete.

    Raises:
        ValueError: if it is not; names the optimizer.
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
                f"optimizer {name} is not elementwise, but with parallel.tensor a rank has only "
                "part of each weight: use sgd, adamw, lars or lamb"
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
    """Bytes of optimizer state per byte of weights."""
    parameter, optimizer = stepped(make, nn.Parameter(torch.zeros(64, 64)))
    kept = [v for state in optimizer.state.values() for v in state.values()]
    large = [v for v in kept if isinstance(v, Tensor) and v.numel() == parameter.numel()]
    return sum(v.nbytes for v in large) / parameter.nbytes


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameter: nn.Parameter
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter and its optimizer after one step, with initialised state."""
    optimizer = make([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return parameter, optimizer


def parameter_groups(
    parameters: Iterable[nn.Parameter], decays_all: bool = True
) -> list[dict[str, Any]]:
    """Split trainable parameters into "decay" and "no_decay", on every rank; either may be empty.

    Parameters with at most one dim are weights of norms and biases. They do not decay (He et al.,
    "Bag of tricks for image classification", 2019, section 3.1) unless `decays_all`.
    """
    parameters = [one for one in parameters if one.requires_grad]
    no_decay = [p for p in parameters if p.dim() <= 1 and not decays_all]
    decay = [p for p in parameters if p.dim() > 1 or decays_all]
    return [
        {"name": "decay", "params": decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]


def make_scheduler(
    settings: DictConfig,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> LRScheduler:
    """Create the learning-rate scheduler of a configuration, to be stepped once per step.

    Args:
        settings: arguments of the scheduler, null for values derived from the run, see
            `_lengths`; and ``warmup_steps`` of a linear warm-up.
        optimizer: the optimizer.
        steps: steps of the whole run.

    Raises:
        ValueError: if the warm-up is as long as the run, or the scheduler cannot be created.
    """
    settings = settings.copy()
    with open_dict(settings):
        warm_up = settings.pop("warmup_steps", 0)
        if not isinstance(warm_up, int) or not 0 <= warm_up < steps:
            raise ValueError(
                f"scheduler.warmup_steps={warm_up} must be at least 0 and below the run's {steps} "
                "steps"
            )
        if "pct_start" in settings:  # OneCycleLR has its own warm-up
            if warm_up:
                settings.pct_start = (warm_up + 1) / steps
            warm_up = 0
    rates = [group["lr"] for group in optimizer.param_groups]
    for key, value in _lengths(steps - warm_up).items() | {("max_lr", rates[0])}:
        if key in settings and settings[key] is None:
            settings[key] = value
    try:
        scheduler: LRScheduler = hydra.utils.instantiate(settings)(optimizer)
    except (TypeError, ValueError, hydra.errors.InstantiationException) as error:
        raise ValueError(f"cannot create the scheduler: {describe_cause(error)}") from error
    if warm_up == 0:
        return scheduler
    linear = LinearLR(optimizer, 1 / (warm_up + 1), total_iters=warm_up)
    return SequentialLR(optimizer, [linear, scheduler], [warm_up])


def go_to_step(scheduler: LRScheduler, steps: int) -> None:
    """Advance a new scheduler by `steps` steps.

    Replaying, instead of loading its state, applies a changed configuration.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch expects optimizer steps in between
        for _ in range(steps):
            scheduler.step()


def _lengths(steps: int) -> dict[str, int]:
    """Length arguments of schedulers, for `steps` steps after the warm-up."""
    third = max(1, -(-steps // 3))
    return {"T_max": steps, "total_iters": steps, "total_steps": steps, "step_size": third}
