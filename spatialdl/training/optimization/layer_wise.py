"""Layer-wise adaptive optimizers for large batches: LARS and LAMB.

LARS: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, section 4.
LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
algorithm 2, with the identity for phi. Groups without weight decay (usually norms and biases) are
not adapted.
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
from spatialdl.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt_,
    foreach_sub_,
)


class LayerWise(torch.optim.Optimizer):
    """Base class: multi-tensor steps without synchronising the host with the device.

    Attributes:
        divided: communicator of the ranks that share a parameter, by the parameter's id.
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
            for parameters in self._batches(trained):
                grads = [one.grad for one in parameters if one.grad is not None]
                self._step_group(parameters, grads, group)
        return loss

    def _step_group(
        self, parameters: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError

    def _batches(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Parameters per multi-tensor call; on a CPU one by one, which stays in the cache."""
        if parameters and (parameters[0].device.type != "cpu" or self.divided):
            return [parameters]
        return [[one] for one in parameters]

    def _norms(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Norms of tensors shaped like the parameters, over all ranks that share these."""
        norms = list(foreach_norm(list(tensors)))
        over = [self.divided.get(id(one)) for one in parameters]
        for comm in {id(one): one for one in over if one is not None}.values():
            places = [place for place, one in enumerate(over) if one is comm]
            own = torch.stack([norms[place] for place in places])
            squares = sum_over_ranks(comm, own.double().square(), "norms of parameters")
            for place, whole in zip(places, squares.sqrt().to(own.dtype).unbind(), strict=True):
                norms[place] = whole
        return torch.stack(norms)

    def _buffers(self, parameters: list[Tensor], key: str) -> list[Tensor]:
        """State of the parameters under a key, initialised with zeros."""
        for one in parameters:
            if key not in self.state[one]:
                self.state[one][key] = torch.zeros_like(one)
        return [self.state[one][key] for one in parameters]


class LARS(LayerWise):
    """LARS: momentum SGD with each gradient scaled to a share of the norm of its weight.

    Args:
        params: parameters or groups.
        lr: global learning rate, at least 0.
        momentum: momentum, in [0, 1).
        weight_decay: weight decay, at least 0; gradients of groups with 0 are not scaled.
        trust: trust coefficient, eta in the paper.
        eps: added to the denominator.

    Raises:
        ValueError: if a number is out of range.
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
            # weights of 0 would never move, and gradients of 0 would apply all decay at once
            rates = torch.where((weights > 0) & (gradients > 0), rate * local, rate)
            steps = foreach_add(grads, parameters, alpha=decay)
            foreach_mul_(steps, rates.unbind())
        else:
            steps = foreach_mul(grads, rate)
        buffers = self._buffers(parameters, "momentum_buffer")
        foreach_mul_(buffers, group["momentum"])
        foreach_add_(buffers, steps)
        foreach_sub_(parameters, buffers)


class LAMB(LayerWise):
    """LAMB: AdamW with each step scaled to the norm of its weight, times `lr`.

    Args:
        params: parameters or groups.
        lr: learning rate, at least 0.
        betas: decay of the averages of gradient and squared gradient, in [0, 1).
        eps: added to the denominator.
        weight_decay: weight decay, at least 0; steps of groups with 0 are not scaled.

    Raises:
        ValueError: if a number is out of range.
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
        means = self._buffers(parameters, "exp_avg")
        squares = self._buffers(parameters, "exp_avg_sq")
        foreach_lerp_(means, grads, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = foreach_div(squares, [1 - beta2**count for count in counts])
        foreach_sqrt_(roots)
        foreach_add_(roots, group["eps"])
        steps = foreach_div(means, [1 - beta1**count for count in counts])
        foreach_div_(steps, roots)
        if group["weight_decay"]:
            foreach_add_(steps, parameters, alpha=group["weight_decay"])
            weights = self._norms(parameters, parameters)
            lengths = self._norms(parameters, steps)
            ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
            foreach_mul_(steps, ratios.unbind())
        foreach_sub_(parameters, steps, alpha=float(group["lr"]))

    def _counted(self, parameter: Tensor) -> float:
        """Increment and return the step count of a parameter, on the host."""
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
