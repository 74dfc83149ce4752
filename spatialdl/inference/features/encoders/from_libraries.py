"""Encoders of other libraries: `timm:NAME`, `torchvision:NAME`.

Names of timm may be `hf-hub:OWNER/NAME` or `local-dir:FOLDER`; those of torchvision are its
classification networks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.hub
from torch import nn

from spatialdl.inference.features.encoders.encoder import Encoder, Features, Wish, load_file
from spatialdl.inference.features.encoders.maps import TimmMap, TorchvisionMap
from spatialdl.inference.features.encoders.preprocessing import Preprocessing, centred

_CLASSES = 1000  # classes of ImageNet


class DownloadError(ValueError):
    """A file is not cached on this machine, and downloads are disabled."""


@contextmanager
def offline() -> Iterator[None]:
    """Restrict hubs to their caches within the block."""

    def refuse(url: str, *args: Any, **named: Any) -> None:
        raise DownloadError(f"{url} is not in {torch.hub.get_dir()}/checkpoints")

    constants: Any = None
    try:
        from huggingface_hub import constants as found

        constants = found
    except ImportError:
        pass
    with (
        patch.dict(os.environ, HF_HUB_OFFLINE="1"),
        patch("torch.hub.download_url_to_file", refuse),
    ):
        if constants is None:
            yield
            return
        with patch.object(constants, "HF_HUB_OFFLINE", new=True):
            yield


def timm_encoder(wish: Wish) -> Encoder:
    """Make a timm network without its classifier, with the pre-processing of its configuration.

    Raises:
        ValueError: timm is missing or has no such network, or its weights are missing.
    """
    try:
        import timm
        import timm.data
    except (ImportError, RuntimeError) as error:  # also where timm and torchvision do not match
        raise ValueError(
            f"--encoder {wish.name} needs timm ({error}): pip install 'spatialdl[features]'"
        ) from error
    pretrained = wish.weights is None
    try:
        with nullcontext() if wish.download else offline():
            network = timm.create_model(
                wish.rest, pretrained=pretrained, **{"num_classes": 0, **wish.arguments}
            )
    except Exception as error:  # hubs and networks may raise anything
        name = wish.rest.removeprefix("hf-hub:").removeprefix("hf_hub:")
        repository = name if "/" in name else f"timm/{name}"
        advice = f"give --weights FILE, download them beforehand (hf download {repository})"
        raise _error(wish, error, f"{advice}, or add --download") from error
    if wish.weights is not None:
        load_file(network, wish.weights)
    config = timm.data.resolve_data_config({}, model=network)
    size, part = int(config["input_size"][-1]), float(config["crop_pct"])
    if config["input_size"][-2] != size:
        raise ValueError(
            f"--encoder {wish.name} takes images of {config['input_size'][-2]} x {size}, but tiles "
            "are square: add --input-size"
        )
    resized = int(size / part)  # rounded as in timm
    found = Preprocessing(
        size,
        tuple(map(float, config["mean"])),
        tuple(map(float, config["std"])),
        wish.interpolation or str(config["interpolation"]),
        resized if resized > size else None,
        centred(resized, size),
    )
    source = str(wish.weights or f"pretrained {wish.rest}")
    features = TimmMap(network) if wish.whole else Features(network)
    return Encoder(features, wish.preprocessing(found), source)


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
        raise _error(wish, error, "give --weights FILE, or add --download") from error
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


def _error(wish: Wish, error: Exception, advice: str) -> ValueError:
    reason = f"--encoder {wish.name} cannot be made: {str(error).strip().partition(chr(10))[0]}"
    if wish.weights is None and not wish.download:
        reason += f"; downloads are disabled: {advice}"
    return ValueError(reason)
