"""Encoders of other libraries: `timm:NAME`, `torchvision:NAME`.

Names of timm may be `hf-hub:OWNER/NAME` or `local-dir:FOLDER`; those of torchvision are its
classification networks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from math import prod
from typing import Any
from unittest.mock import patch

import torch.hub
from torch import Tensor, nn
from torch.nn import functional as F

from spatialdl.inference.features.encoders.encoder import (
    Encoder,
    Features,
    Preprocessing,
    Wish,
    Wrapper,
    centred,
    load_file,
)

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


# --- encoders that return a map of an image, (N, width, rows, columns), instead of a vector


_OWN = "write a class that returns a map, --encoder package.Class"


class FeatureMap(Wrapper):
    """A wrapper that checks that a network returns a map (N, width, rows, columns)."""

    def forward(self, images: Tensor) -> Tensor:
        """A map (N, width, rows, columns)."""
        return as_map(self.network(images), len(images))


class TimmMap(Wrapper):
    """The output of a timm network before pooling; for transformers the patch tokens."""

    def forward(self, images: Tensor) -> Tensor:
        """A map (N, width, rows, columns)."""
        network: Any = self.network
        found = network.forward_features(images)
        if isinstance(found, Tensor) and found.dim() == 3:
            patch = getattr(getattr(network, "patch_embed", None), "patch_size", None)
            prefix = getattr(network, "num_prefix_tokens", 0)
            found = of_patches(found[:, prefix:], images, patch)
        elif getattr(network, "output_fmt", "NCHW") == "NHWC":
            found = found.permute(0, 3, 1, 2)
        return as_map(found, len(images))


class TransformersMap(Wrapper):
    """The last hidden state of a network of transformers, as a map.

    Args:
        network: takes `pixel_values`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        takes = signature(network.forward).parameters
        resizes = "interpolate_pos_encoding" in takes
        self._more = {"interpolate_pos_encoding": True} if resizes else {}

    def forward(self, images: Tensor) -> Tensor:
        """A map (N, width, rows, columns)."""
        found = self.network(pixel_values=images, **self._more).last_hidden_state
        if found.dim() == 3:
            config: Any = self.network.config
            patch = getattr(config, "patch_size", None)
            patch = (patch, patch) if isinstance(patch, int) else patch
            patches = 0 if patch is None else prod(_grid(images, patch))
            # class and register tokens precede the patches
            found = of_patches(found[:, max(0, found.shape[1] - patches) :], images, patch)
        return as_map(found, len(images))


class TorchvisionMap(Wrapper):
    """The output of a torchvision network before pooling.

    Args:
        network: a classification network of torchvision.
        name: the user's name of it, for messages.

    Raises:
        ValueError: its layers before pooling are unknown.
    """

    def __init__(self, network: Any, name: str) -> None:
        super().__init__(network)
        kind = type(network).__name__
        self._rectified = kind == "DenseNet"
        self._last_channels = kind == "SwinTransformer"
        self._layers: tuple[str, ...]
        if kind == "ResNet":
            self._layers = ("conv1", "bn1", "relu", "maxpool", *(f"layer{n}" for n in range(1, 5)))
        elif kind == "RegNet":
            self._layers = ("stem", "trunk_output")
        elif isinstance(getattr(network, "features", None), nn.Module):
            self._layers = ("features", "norm") if self._last_channels else ("features",)
        else:
            raise ValueError(f"--whole: it is unknown where {name} pools its map; {_OWN}")

    def forward(self, images: Tensor) -> Tensor:
        """A map (N, width, rows, columns)."""
        found = images
        for name in self._layers:
            found = self.network.get_submodule(name)(found)
        if self._rectified:
            found = F.relu(found)
        if self._last_channels:
            found = found.permute(0, 3, 1, 2)
        return as_map(found, len(images))


def of_patches(tokens: Tensor, images: Tensor, patch: Any) -> Tensor:
    """Reshape patch tokens to a map.

    Args:
        tokens: (N, patches, width), in row-major order.
        images: (N, C, H, W), the input.
        patch: rows and columns of a patch.

    Raises:
        ValueError: the number of tokens does not match.
    """
    size = None if patch is None else _grid(images, patch)
    if size is None or tokens.shape[1] != prod(size):
        raise ValueError(
            f"the encoder returns {tokens.shape[1]} tokens for an image of "
            f"{images.shape[2]} x {images.shape[3]}, whose positions are unknown; {_OWN}"
        )
    return tokens.transpose(1, 2).reshape(len(tokens), tokens.shape[2], *size)


def _grid(images: Tensor, patch: Any) -> tuple[int, int]:
    rows, columns = patch
    return images.shape[2] // int(rows), images.shape[3] // int(columns)


def as_map(found: object, count: int) -> Tensor:
    """Check that an output is a map, (count, width, rows, columns).

    Raises:
        ValueError: it has another shape, or is not a tensor.
    """
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the encoder returns a {type(found).__name__}, expected a tensor (images, width, "
            "rows, columns)"
        )
    if found.dim() != 4 or len(found) != count:
        raise ValueError(
            f"the encoder returns {list(found.shape)} for {count} images, but --whole needs a map "
            "(images, width, rows, columns): leave --whole out for a vector per tile"
        )
    return found
