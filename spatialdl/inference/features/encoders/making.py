"""Construction of encoders by name: of libraries, or the user's own `package.Class`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spatialdl.inference.features.encoders.encoder import (
    Encoder,
    Features,
    Preprocessing,
    Wish,
    as_features,
    load_file,
)
from spatialdl.inference.features.encoders.libraries import (
    FeatureMap,
    TransformersMap,
    offline,
    timm_encoder,
    torchvision_encoder,
)
from spatialdl.training.network.weights import read_weights

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


# --- encoders of transformers: `transformers:FOLDER`, written by `save_pretrained`


_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's constants


def transformers_encoder(wish: Wish) -> Encoder:
    """Load the network of a folder, with the pre-processing of its image processor.

    Raises:
        ValueError: transformers is missing, or the folder has no network, or lacks weights.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"--encoder {wish.name} needs transformers ({error}): pip install 'spatialdl[features]'"
        ) from error
    where = Path(wish.rest).expanduser()
    source = str(where) if where.is_dir() else wish.rest
    if not where.is_dir() and ("/" not in wish.rest or where.is_absolute()):
        raise ValueError(
            f"--encoder {wish.name}: there is no folder {where}; give one written by "
            "save_pretrained, with config.json and preprocessor_config.json"
        )
    local = not wish.download
    try:
        with offline() if local else nullcontext():
            network, missing = _load(wish, source, local)
            processors: Any = transformers.AutoImageProcessor
            processor = processors.from_pretrained(source, local_files_only=local)
    except Exception as error:  # networks may raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--encoder {wish.name} cannot be made: {reason}; give a folder with config.json, "
            f"preprocessor_config.json and weights (hf download {wish.rest} --local-dir FOLDER)"
        ) from error
    if wish.pool != "pooler" and any("pooler" in key for key in missing):
        network.pooler = None  # not trained, but randomly initialised
        missing = [key for key in missing if "pooler" not in key]
    if hasattr(network, "vision_model"):  # a network of text and images
        network = network.vision_model
        missing = [key for key in missing if key.startswith("vision_model.")]
    if missing:
        raise ValueError(
            f"--encoder {wish.name} has no weights for {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}: they would be random"
        )
    steps = wish.preprocessing(processor_steps(processor, network.config, wish))
    weights = str(wish.weights or source)
    made = TransformersMap(network) if wish.whole else Pooled(network, wish.pool, steps.size)
    return Encoder(made, steps, weights)


def _load(wish: Wish, source: str, local: bool) -> tuple[Any, list[str]]:
    """Load a network; returns it with the names of missing weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        # PyTorch lists the functions that such a context changes when it is first used, and
        # transformers replaces torch.linspace while it loads: the list would keep the replacement
        torch.empty(0)
    if wish.weights is None:
        network, found = AutoModel.from_pretrained(
            source, local_files_only=local, output_loading_info=True, **wish.arguments
        )
        return network, sorted(found["missing_keys"])
    config = AutoConfig.from_pretrained(source, local_files_only=local, **wish.arguments)
    models: Any = AutoModel
    network = models.from_config(config)
    given = read_weights(wish.weights)
    if wish.pool != "pooler" and not any("pooler" in key for key in given):
        network.pooler = None
    load_file(network, wish.weights, str(network.base_model_prefix))
    return network, []


def processor_steps(processor: Any, config: Any, wish: Wish) -> Preprocessing:
    """The resize, crop, scale and normalisation of an image processor.

    Raises:
        ValueError: the input size or the interpolation is unknown.
    """
    resize, crop = (
        bool(getattr(processor, f"do_{what}", False)) for what in ("resize", "center_crop")
    )
    resized = _side(getattr(processor, "size", None)) if resize else None
    cropped = _side(getattr(processor, "crop_size", None)) if crop else None
    size = wish.size or cropped or resized or _side(getattr(config, "image_size", None))
    if size is None:
        raise ValueError(f"--encoder {wish.name} has no known input size: add --input-size")
    number = int(getattr(processor, "resample", None) or 3)
    interpolation = wish.interpolation or _RESAMPLE.get(number, f"Pillow's {number}")
    rescale = bool(getattr(processor, "do_rescale", True))
    normalise = bool(getattr(processor, "do_normalize", False))
    mean = tuple(map(float, processor.image_mean)) if normalise else (0.0,) * 3
    std = tuple(map(float, processor.image_std)) if normalise else (1.0,) * 3
    more = resized if cropped and resized and resized > size else None
    return Preprocessing(
        size,
        wish.mean or mean,
        wish.std or std,
        interpolation,
        more,
        0 if more is None else (more - size) // 2,
        float(processor.rescale_factor) if rescale else 1.0,
    )


def _side(size: Any) -> int | None:
    """The side of a square size, in any of the forms of processors; None if unknown."""
    if isinstance(size, int):
        return size
    if isinstance(size, list | tuple):
        return int(size[0])
    keys = ("height", "width", "shortest_edge")
    given = size if isinstance(size, Mapping) else {key: getattr(size, key, None) for key in keys}
    values = [side for key in keys if (side := given.get(key))]
    return int(values[0]) if values and len(set(values)) == 1 else None


class Pooled(nn.Module):
    """Pooling of a transformers network's output to one vector per image.

    Args:
        network: takes `pixel_values`.
        pool: "pooler": its pooler_output; "class": its class token; "mean": the mean of its
            patches; "auto": the first of these that exists.
        size: rows and columns of the images.
    """

    def __init__(self, network: nn.Module, pool: str, size: int) -> None:
        super().__init__()
        self.network, self._pool = network, pool
        patch = _side(getattr(network.config, "patch_size", None))
        self._patches = None if patch is None else (size // patch) ** 2

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, width).

        Raises:
            ValueError: the network lacks the output of `pool`.
        """
        given = self.network(pixel_values=images)
        pooled = getattr(given, "pooler_output", None)
        if self._pool == "pooler" and pooled is None:
            raise ValueError("--pool pooler: the encoder has no pooler; use class or mean")
        if self._pool in ("auto", "pooler") and pooled is not None:
            return as_features(pooled, len(images))
        return as_features(self._of_patches(given.last_hidden_state), len(images))

    def _of_patches(self, hidden: Tensor) -> Tensor:
        if hidden.dim() == 4:  # a map (N, width, rows, columns)
            if self._pool == "class":
                raise ValueError("--pool class: the encoder has no class token; use mean")
            return hidden.mean((2, 3))
        before = None if self._patches is None else hidden.shape[1] - self._patches
        if before is None or before < 0:
            raise ValueError(
                f"the encoder returns {prod(hidden.shape[1:2])} tokens per image, and it is "
                "unknown which are patches: write a class, --encoder package.Class"
            )
        if self._pool == "class" and before == 0:
            raise ValueError("--pool class: the encoder has no class token; use mean")
        if self._pool in ("auto", "class") and before > 0:
            return hidden[:, 0]
        return hidden[:, before:].mean(1)  # registers precede the patches as well
