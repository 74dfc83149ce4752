"""Optimizers for large batches, which adapt the length of a step to the length of each weight.

LARS: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, section 4.
LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
algorithm 2, with the identity for phi. Neither adapts groups without weight decay, as is usual for
norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class _LayerWise(torch.optim.Optimizer):
    """Steps parameter by parameter; all of each must lie on this rank."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _step_one(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class LARS(_LayerWise):
    """SGD with momentum, the gradient of each weight scaled to a share of the weight's norm.

    Args:
        lr: global learning rate, at least 0.
        momentum: in [0, 1).
        weight_decay: at least 0; of groups with 0 the gradients are not scaled.
        trust: that share, eta in the paper.
        eps: keeps norms of 0 from dividing.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, trust=trust, eps=eps)
        _check_share(momentum=momentum)
        defaults = {
            **{"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            **{"trust": trust, "eps": eps},
        }
        super().__init__(params, defaults)

    def _step_one(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        decay, rate = group["weight_decay"], grad.new_tensor(float(group["lr"]))
        if decay:
            weight, gradient = parameter.norm(), grad.norm()
            local = group["trust"] * weight / (gradient + decay * weight + group["eps"])
            # a weight or gradient of 0 would never move, or by all of its decay at once
            rate = torch.where((weight > 0) & (gradient > 0), rate * local, rate)
            grad = grad + decay * parameter
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        step = state["momentum_buffer"].mul_(group["momentum"]).add_(rate * grad)
        parameter.sub_(step)


class LAMB(_LayerWise):
    """Adam with decoupled weight decay, each weight's step as long as the weight, times `lr`.

    Args:
        lr: learning rate, at least 0.
        betas: decay of the averages of gradient and squared gradient, in [0, 1).
        eps: keeps averages of 0 from dividing.
        weight_decay: at least 0; of groups with 0 the steps are not scaled.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, eps=eps)
        _check_share(beta1=betas[0], beta2=betas[1])
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _step_one(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps, (beta1, beta2) = float(state["step"]), group["betas"]
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_()
        step = mean / (1 - beta1**steps) / root.add_(group["eps"])
        if group["weight_decay"]:
            step.add_(parameter, alpha=group["weight_decay"])
            weight, length = parameter.norm(), step.norm()
            ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
            step.mul_(ratio)
        parameter.sub_(step, alpha=float(group["lr"]))


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must be at least 0")


def _check_share(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
