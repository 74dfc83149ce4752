"""Training mode, in which layers that were told to rest do not take part."""

from __future__ import annotations

from torch import nn

_RESTS = "rests_in_training"  # an attribute, so that copies of the layer have it too


def rest_in_training(layer: nn.Module) -> None:
    """Keep a layer in evaluation mode while others train: BatchNorm, with its statistics frozen.

    Weights that do not learn are no such sign: in PyTorch their BatchNorm goes on counting.
    """
    setattr(layer, _RESTS, True)


def start_training(stage: nn.Module) -> None:
    """Put a stage into training mode, but not the layers that rest."""
    stage.train()
    for layer in stage.modules():
        if getattr(layer, _RESTS, False):
            layer.eval()
