"""Construction of encoders by name: of libraries, or the user's own `package.Class`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from torch import nn

from spatialdl.inference.features.encoders.encoder import Encoder, Features, Wish, load_file
from spatialdl.inference.features.encoders.from_libraries import timm_encoder, torchvision_encoder
from spatialdl.inference.features.encoders.from_transformers import transformers_encoder
from spatialdl.inference.features.encoders.maps import FeatureMap
from spatialdl.inference.features.encoders.preprocessing import Preprocessing

_SIDE = 224  # side of the image used to find the width of a map


def make_encoder(wish: Wish) -> Encoder:
    """Make an encoder on the CPU, in evaluation mode, without gradients.

    Raises:
        ValueError: the encoder cannot be made.
    """
    if wish.weights is not None and not wish.weights.is_file():
        raise ValueError(f"--weights {wish.weights}: there is no such file")
    if wish.pool != "auto" and wish.kind != "transformers":
        raise ValueError(
            f"--pool {wish.pool} needs --encoder transformers:..., not {wish.name}: leave it out"
        )
    if wish.pool != "auto" and wish.whole:
        raise ValueError(f"--pool {wish.pool} is for tiles, but --whole has maps: leave it out")
    makers = {
        "timm": timm_encoder,
        "transformers": transformers_encoder,
        "torchvision": torchvision_encoder,
        "own": own_encoder,
    }
    encoder = makers[wish.kind](wish)
    encoder.network.float().eval().requires_grad_(False)
    return encoder


def own_encoder(wish: Wish) -> Encoder:
    """Call an importable class or function with the arguments to make an encoder.

    The network's attributes `input_size`, `mean`, `std` and `interpolation` define its
    pre-processing, and options override them. Without a size, tiles are not resized.

    Raises:
        ValueError: it cannot be imported or called, or its pre-processing is undefined.
    """
    target = _imported(wish.rest)
    try:
        network = target(**wish.arguments)
    except Exception as error:  # the user's code
        raise ValueError(
            f"--encoder {wish.name} cannot be made with {dict(wish.arguments)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"--encoder {wish.name} returns a {type(network).__name__}, expected a torch.nn.Module"
        )
    if wish.weights is not None:
        load_file(network, wish.weights)
    steps = Preprocessing(
        _size(wish, network),
        _of_colours(_required(wish.mean, network, "mean", "--mean")),
        _of_colours(_required(wish.std, network, "std", "--std")),
        wish.interpolation or str(getattr(network, "interpolation", "bicubic")),
    )
    source = str(wish.weights or f"made by {wish.name}")
    features = FeatureMap(network) if wish.whole else Features(network)
    return Encoder(features, wish.preprocessing(steps), source)


def _imported(name: str) -> Any:
    module, _, last = name.rpartition(".")
    if not module:
        raise ValueError(
            f"--encoder {name}: expected timm:NAME, transformers:FOLDER, torchvision:NAME, or "
            "your own package.Class"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python -m`
    try:
        return getattr(import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--encoder {name} cannot be imported ({error}): expected timm:NAME, "
            "transformers:FOLDER, torchvision:NAME, or package.Class"
        ) from error


def _size(wish: Wish, network: nn.Module) -> int:
    found = wish.size or getattr(network, "input_size", None) or wish.tile_size
    if wish.whole and not found:
        return _SIDE
    return int(_required(found, network, "input_size", "--input-size or --tile-size"))


def _of_colours(value: Any) -> tuple[float, ...]:
    """One value per colour, of one or three numbers."""
    return (float(value),) * 3 if isinstance(value, int | float) else tuple(map(float, value))


def _required(given: Any, network: nn.Module, name: str, option: str) -> Any:
    found = given if given is not None else getattr(network, name, None)
    if found is None:
        raise ValueError(
            f"the encoder has no attribute {name}: add {option}, or define it in the class"
        )
    return found
