"""Training mode, in which frozen BatchNorm layers do not take part."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def start_training(stage: nn.Module) -> None:
    """Put a stage into training mode, but not BatchNorm layers of which nothing learns.

    They go on with their running statistics, as the weights after them expect. Layers without
    parameters are in training mode.
    """
    stage.train()
    for layer in stage.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, _BatchNorm) and own and not any(p.requires_grad for p in own):
            layer.eval()
