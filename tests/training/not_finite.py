"""Networks with non-finite values at a chosen place."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

CHAIN = ("model=resnet18", "model._target_=tests.training.not_finite.chain", "~model.width")


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Poison(nn.Module):
    """Lets everything pass, until its call number `call` in training.

    Args:
        kind: "forward" to spoil what passes in that call, "from" also in all later ones.
        part: of the tiles of an image that is spoilt; None: every one.
    """

    def __init__(self, kind: str, call: int, part: int | None = None) -> None:
        super().__init__()
        self.kind, self.call, self.part, self.calls = kind, call, part, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.device.type == "meta":
            return x + 0
        self.calls += 1
        mesh = getattr(x, "mesh", None)
        mine = self.part is None or mesh is None or mesh.part == self.part
        now = self.calls - 1
        if mine and (self.kind, now) == ("forward", self.call):
            return x * float("nan")
        if mine and self.kind == "from" and now >= self.call:
            return x * float("nan")
        return x + 0


class BadGradient(nn.Module):
    """Its gradient is infinite, from its call number `call` in training."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.device.type == "meta":
            return x + 0
        self.calls += 1
        return _BadGradient.apply(x) if self.calls > self.call else x + 0


class Unlucky(nn.Module):
    """Spoils what passes where it draws, by a generator of nobody's, a number above 0.9."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.device.type == "meta":
            return x + 0
        return x * (float("nan") if random.random() > 0.9 else 1.0)


class Extreme(nn.Module):
    """As sure of class 0 as float32 allows: the cross entropy of any other class is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + torch.where(torch.arange(x.shape[1], device=x.device) == 0, 3e38, -3e38)


def _poison(kind: str, call: int, part: int | None) -> nn.Module:
    if kind == "backward":
        return BadGradient(call)
    return Unlucky() if kind == "unlucky" else Poison(kind, call, part)


def chain(
    num_classes: int = 3, in_channels: int = 3, kind: str = "none", call: int = 0, part: Any = None
) -> nn.Sequential:
    """Two convolutions, `poison` after the first, and a head."""
    torch.manual_seed(0)
    layers = nn.Sequential()
    layers.add_module("conv1", nn.Conv2d(in_channels, 4, 3, padding=1))
    layers.add_module("relu", nn.ReLU(inplace=True))
    layers.add_module("poison", _poison(kind, call, part))
    layers.add_module("conv2", nn.Conv2d(4, 4, 3, stride=2, padding=1))
    layers.add_module("norm", nn.BatchNorm2d(4))
    layers.add_module("pool", nn.AdaptiveAvgPool2d(1))
    layers.add_module("flat", nn.Flatten())
    layers.add_module("fc", nn.Linear(4, num_classes))
    if kind == "loss":
        layers.add_module("last", Extreme())
    return layers
