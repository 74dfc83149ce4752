"""Encoders: frozen networks with their pre-processing, the request for one, and their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.training.network.weights import read_weights, strip_prefixes

POOLS = ("auto", "pooler", "class", "mean")
KINDS = ("timm", "transformers", "torchvision")
HEADS = ("head", "heads", "head_dist", "fc", "classifier", "last_linear", "logits")
"""Names of last layers, which encoders do not have."""

_COUNTER = "num_batches_tracked"  # missing in old files
_SHOWN = 3


@dataclass(frozen=True)
class Wish:
    """A request for an encoder.

    Attributes:
        name: `KIND:NAME`, or `package.Class`.
        weights: file of weights; None for the default weights of the name.
        arguments: arguments of the network.
        pool: pooling of the output of a transformers network, one of `POOLS`.
        download: download missing weights.
        crop: crop as in the encoder's transform; otherwise whole tiles are resized.
        size, mean, std, interpolation: override the encoder's pre-processing.
        tile_size: size of the tiles, if known.
        whole: maps of whole regions instead of a vector per tile.
    """

    name: str
    weights: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pool: str = "auto"
    download: bool = False
    crop: bool = False
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    tile_size: int | None = None
    whole: bool = False

    @property
    def kind(self) -> str:
        """One of `KINDS`, or "own"."""
        kind, colon, _ = self.name.partition(":")
        return kind if colon and kind in KINDS else "own"

    @property
    def rest(self) -> str:
        """The name without its kind."""
        return self.name if self.kind == "own" else self.name.partition(":")[2]

    def preprocessing(self, found: Preprocessing) -> Preprocessing:
        """The pre-processing of the encoder, with the user's overrides.

        Args:
            found: pre-processing of the encoder, with the crop of its transform.
        """
        size = self.size or found.size
        resized, offset = None, 0
        if self.crop:
            if found.resized is None or found.resized < found.size:
                raise ValueError(
                    f"--crop: the transform of {self.name} does not crop; leave it out"
                )
            resized, offset = found.resized, found.offset
            if size != found.size:
                resized = round(size * found.resized / found.size)
                offset = centred(resized, size)
        return replace(
            found,
            size=size,
            mean=self.mean or found.mean,
            std=self.std or found.std,
            interpolation=self.interpolation or found.interpolation,
            resized=resized,
            offset=offset,
        )


@dataclass(frozen=True)
class Encoder:
    """A network without its head, in evaluation mode.

    Attributes:
        network: maps images (N, 3, size, size) to features (N, width); for whole regions, images of
            any size to maps (N, width, rows, columns).
        preprocessing: pre-processing of tiles.
        weights: description of the weights' origin.
    """

    network: nn.Module
    preprocessing: Preprocessing
    weights: str

    def digest(self) -> str:
        """SHA-256 of all weights and buffers, with their names."""
        digest = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            digest.update(name.encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy())
        return digest.hexdigest()

    @torch.inference_mode()
    def width(self) -> int:
        """Features per tile, found with an empty image.

        Raises:
            ValueError: the network does not take images of its input size, or returns no features.
        """
        side = self.preprocessing.size
        try:
            found = self.network(torch.zeros(1, 3, side, side))
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"the encoder does not take images of {side} x {side}: "
                f"{str(error).partition(chr(10))[0]}; set another size by --input-size"
            ) from error
        return int(found.shape[1])


class Wrapper(nn.Module):
    """A module around a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


class Features(Wrapper):
    """A wrapper that checks that a network returns features (N, width), or (N, width, 1, 1)."""

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, width)."""
        return as_features(self.network(images), len(images))


def as_features(found: object, count: int) -> Tensor:
    """Convert an output to features (count, width).

    Raises:
        ValueError: it has another shape, or is not a tensor.
    """
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the encoder returns a {type(found).__name__}, expected a tensor (tiles, width)"
        )
    if found.dim() == 4 and found.shape[2:] == (1, 1):
        found = found.flatten(1)
    if found.dim() != 2 or len(found) != count:
        raise ValueError(
            f"the encoder returns {list(found.shape)} for {count} images, expected (tiles, width): "
            "it must return one vector per image"
        )
    return found


# --- weights


def load_file(network: nn.Module, file: Path, base: str = "") -> None:
    """Load a file of weights.

    Args:
        network: the network without its head.
        file: .safetensors, or a file of `torch.save`, of which only tensors are unpickled.
        base: optional prefix of names, as in files of networks with a head.

    Raises:
        ValueError: weights are missing, have other shapes, or are of another network.
    """
    wanted = network.state_dict()
    given = strip_prefixes(read_weights(file), wanted)
    if base:
        given = {key.removeprefix(f"{base}."): value for key, value in given.items()}
    missing = [key for key in wanted if key not in given and not key.endswith(_COUNTER)]
    excess = [key for key in given if key not in wanted and key.partition(".")[0] not in HEADS]
    other = [key for key in wanted if key in given and given[key].shape != wanted[key].shape]
    if missing or excess or other:
        problems = [
            f"{what} {_some(keys)}"
            for what, keys in (
                ("missing", missing),
                ("unexpected", excess),
                ("of other shapes", other),
            )
            if keys
        ]
        raise ValueError(
            f"--weights {file} does not match the encoder: {'; '.join(problems)}; set sizes and "
            "options of the network by --encoder-args"
        )
    network.load_state_dict({key: given[key] for key in wanted if key in given}, strict=False)


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"


# --- pre-processing of batches of tiles for an encoder, on the device


INTERPOLATIONS = ("bilinear", "bicubic")
_WHITE = 255


@dataclass(frozen=True)
class Preprocessing:
    """Settings of resize, crop, scale and normalisation.

    Tiles are resized with antialiasing and rounded to integers, as in Pillow. The whole tile is
    resized to `size`, or to `resized` and then cropped.

    Attributes:
        size: rows and columns of the encoder's input.
        mean, std: of red, green and blue, after scaling.
        interpolation: one of `INTERPOLATIONS`.
        resized: rows and columns to which a tile is resized before it is cropped to `size`; None
            for no crop.
        offset: first row and column of the crop.
        scale: factor of pixel values from 0 to 255.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    resized: int | None = None
    offset: int = 0
    scale: float = 1 / _WHITE

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation={self.interpolation} is not supported: set --interpolation to "
                f"{' or '.join(INTERPOLATIONS)}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(map(isfinite, values)):
                raise ValueError(
                    f"{name} is {', '.join(map(str, values))}, expected three finite numbers, of "
                    f"red, green and blue: add --{name}"
                )
        if min(self.std) <= 0:
            raise ValueError(f"std is {', '.join(map(str, self.std))}, expected numbers above 0")
        if self.resized is not None and not 0 <= self.offset <= self.resized - self.size:
            raise ValueError(
                f"a tile resized to {self.resized} cannot be cropped to {self.size}: leave --crop "
                "out, or lower --input-size"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for a manifest."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


class Preprocess(nn.Module):
    """Module that applies a `Preprocessing`.

    Args:
        steps: the settings.
        dtype: dtype of the output.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, steps: Preprocessing, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._steps = steps
        for name, values in (("mean", steps.mean), ("std", steps.std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype).view(1, -1, 1, 1))

    def forward(self, tiles: Tensor) -> Tensor:
        """Convert tiles uint8 (N, rows, cols, 3) to images (N, 3, size, size)."""
        steps = self._steps
        images = tiles.permute(0, 3, 1, 2).to(self.mean.dtype)
        side = steps.resized or steps.size
        # columns, then rows, rounding after each, as in Pillow
        for size in ((images.shape[2], side), (side, side)):
            if images.shape[2:] != size:
                images = F.interpolate(
                    images, size, mode=steps.interpolation, align_corners=False, antialias=True
                )
                images = (images + 0.5).floor().clamp(0, _WHITE)  # ties upwards
        if steps.resized is not None:
            kept = slice(steps.offset, steps.offset + steps.size)
            images = images[:, :, kept, kept]
        return (images * steps.scale - self.mean) / self.std

    def scaled(self, pixels: Tensor) -> Tensor:
        """Scale and normalise pixels uint8 (N, rows, cols, 3) to images (N, 3, rows, cols)."""
        images = pixels.permute(0, 3, 1, 2).to(self.mean.dtype).contiguous()
        return images.mul_(self._steps.scale).sub_(self.mean).div_(self.std)


def centred(resized: int, size: int) -> int:
    """Offset of a centre crop, rounded as in timm and torchvision."""
    return round((resized - size) / 2)
