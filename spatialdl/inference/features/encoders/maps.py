"""Encoders that return a map of an image, (N, width, rows, columns), instead of a vector.

They take images of any size, split over ranks or not.
"""

from __future__ import annotations

from inspect import signature
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_OWN = "write a class that returns a map, --encoder package.Class"


class Wrapper(nn.Module):
    """A module around a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


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
