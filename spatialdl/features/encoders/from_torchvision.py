"""Encoders of torchvision: `torchvision:NAME`, its classification networks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from spatialdl.features.encoders.encoder import Encoder, Features, Wish
from spatialdl.features.encoders.maps import TorchvisionMap
from spatialdl.features.encoders.offline import offline
from spatialdl.features.encoders.preprocessing import Preprocessing, centred
from spatialdl.features.encoders.weights import load_file

_CLASSES = 1000  # classes of ImageNet


def torchvision_encoder(wish: Wish) -> Encoder:
    """Make a torchvision network without its last layer, with its default weights' transforms.

    Raises:
        ValueError: torchvision is missing or has no such network, or its weights are missing.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"--encoder {wish.name} needs torchvision ({error}): pip install 'spatialdl[features]'"
        ) from error
    try:
        weights: Any = models.get_model_weights(wish.rest).DEFAULT
        with nullcontext() if wish.download else offline():
            network = models.get_model(
                wish.rest, weights=weights if wish.weights is None else None, **wish.arguments
            )
    except Exception as error:  # networks may raise anything
        raise ValueError(_why(wish, error)) from error
    _remove_head(network, wish.name)
    if wish.weights is not None:
        load_file(network, wish.weights)
    steps: Any = weights.transforms()
    size, resized = int(steps.crop_size[0]), int(steps.resize_size[0])
    found = Preprocessing(
        size,
        tuple(map(float, steps.mean)),
        tuple(map(float, steps.std)),
        str(steps.interpolation.value),
        resized if resized > size else None,
        centred(resized, size),
    )
    source = str(wish.weights or weights)
    features = TorchvisionMap(network, wish.name) if wish.whole else Features(network)
    return Encoder(features, wish.preprocessing(found), source)


def _remove_head(network: nn.Module, name: str) -> None:
    """Replace the last layer, which has one output per class, by the identity."""
    heads = [
        key
        for key, layer in network.named_modules()
        if _CLASSES in (getattr(layer, "out_features", 0), getattr(layer, "out_channels", 0))
    ]
    if not heads:
        raise ValueError(
            f"--encoder {name} has no layer of {_CLASSES} classes to remove: write a class that "
            "returns its features, --encoder package.Class"
        )
    parent, _, last = heads[-1].rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())


def _why(wish: Wish, error: Exception) -> str:
    reason = f"--encoder {wish.name} cannot be made: {str(error).strip().partition(chr(10))[0]}"
    if wish.weights is not None or wish.download:
        return reason
    return f"{reason}; downloads are disabled: give --weights FILE, or add --download"
