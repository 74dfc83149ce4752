"""Encoders of transformers: `transformers:FOLDER`, written by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spatialdl.inference.features.encoders.encoder import Encoder, Wish, as_features, load_file
from spatialdl.inference.features.encoders.from_libraries import offline
from spatialdl.inference.features.encoders.maps import TransformersMap
from spatialdl.inference.features.encoders.preprocessing import Preprocessing
from spatialdl.training.network.weights import read_weights

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
    from transformers import AutoConfig, AutoModel

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
