"""Copies of networks on the meta device."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for shapes and costs; in eval mode, which accepts any batch.

    Raises:
        ValueError: the model has uninitialized (lazy) parameters.
    """
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{type(model).__name__} has uninitialized parameters, such as '{path}' of a lazy "
                "module: run one forward, on an image of the data's size, where it is built"
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
            layer.momentum = 0.1  # a cumulative average reads a counter, which has no value here
    return shadow


def computed_attributes(model: nn.Module) -> list[Tensor]:
    """Tensors computed from parameters by hooks, as by weight norm and pruning.

    ``deepcopy`` refuses them.
    """
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
