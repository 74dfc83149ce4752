"""Copies of networks without memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without memory, to find out shapes and costs; in evaluation, which takes any batch.

    Raises:
        ValueError: if it has parameters that its first forward would make.
    """
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{type(model).__name__} has parameters without a shape, as '{path}' of a lazy "
                "module: run it once on an image of the size of the data where it is built"
            )
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    memo |= {id(one): torch.empty_like(one, device="meta") for one in computed_attributes(model)}
    shadow = copy.deepcopy(model, memo).eval()
    for layer in shadow.modules():
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            layer.momentum = 0.1  # a cumulative average would read a counter that has no value
    return shadow


def computed_attributes(model: nn.Module) -> list[Tensor]:
    """Tensors that hooks compute from parameters, as those of weight norm and pruning do.

    ``deepcopy`` refuses them.
    """
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
