"""Optimizers for large batches, which adapt the length of a step to the length of each weight.

LARS: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, section 4.
LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
algorithm 2, with the identity for phi. Neither adapts groups without weight decay, as is usual for
norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import sum_over_ranks


class LayerWise(torch.optim.Optimizer):
    """Steps many parameters at a time, in few kernels; no number of them comes to the host.

    Attributes:
        divided: by the ids of parameters of which this rank has a part, the ranks that have the
            others, and step together with it.
    """

    divided: Mapping[int, Communicator] = MappingProxyType({})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            for some in self._together(trained):
                grads = [one.grad for one in some if one.grad is not None]
                self._step_group(some, grads, group)
        return loss

    def _step_group(
        self, parameters: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError

    def _together(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Those stepped in common kernels, and messages; on a CPU one by one stays in the cache."""
        if parameters and (parameters[0].device.type != "cpu" or self.divided):
            return [parameters]
        return [[one] for one in parameters]

    def _norms(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Of something like each parameter, over all ranks that have parts of it."""
        norms = torch.stack(torch._foreach_norm(list(tensors)))
        over = [self.divided.get(id(one)) for one in parameters]
        for comm in {id(one): one for one in over if one is not None}.values():
            some = [place for place, one in enumerate(over) if one is comm]
            squares = sum_over_ranks(comm, norms[some].double().square(), "norms of parameters")
            norms[some] = squares.sqrt().to(norms.dtype)
        return norms

    def _kept(self, parameters: list[Tensor], key: str) -> list[Tensor]:
        """What is kept of each parameter under a key; at first zeros."""
        for one in parameters:
            if key not in self.state[one]:
                self.state[one][key] = torch.zeros_like(one)
        return [self.state[one][key] for one in parameters]


class LARS(LayerWise):
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

    def _step_group(
        self, parameters: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        decay, rate = group["weight_decay"], float(group["lr"])
        if decay:
            weights = self._norms(parameters, parameters)
            gradients = self._norms(parameters, grads)
            local = group["trust"] * weights / (gradients + decay * weights + group["eps"])
            # a weight or gradient of 0 would never move, or by all of its decay at once
            rates = torch.where((weights > 0) & (gradients > 0), rate * local, rate)
            steps = torch._foreach_add(grads, parameters, alpha=decay)
            torch._foreach_mul_(steps, rates.unbind())
        else:
            steps = torch._foreach_mul(grads, rate)
        buffers = self._kept(parameters, "momentum_buffer")
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, steps)
        torch._foreach_sub_(parameters, buffers)


class LAMB(LayerWise):
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

    def _step_group(
        self, parameters: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        counts = [self._counted(one) for one in parameters]
        means = self._kept(parameters, "exp_avg")
        squares = self._kept(parameters, "exp_avg_sq")
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(steps, roots)
        if group["weight_decay"]:
            torch._foreach_add_(steps, parameters, alpha=group["weight_decay"])
            weights = self._norms(parameters, parameters)
            lengths = self._norms(parameters, steps)
            ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
            torch._foreach_mul_(steps, ratios.unbind())
        torch._foreach_sub_(parameters, steps, alpha=float(group["lr"]))

    def _counted(self, parameter: Tensor) -> float:
        """Steps of a parameter, with this one; a number on the host."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["step"] += 1
        return float(state["step"])


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must be at least 0")


def _check_share(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
