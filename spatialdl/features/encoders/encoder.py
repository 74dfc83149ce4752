"""A frozen network with what it wants of its input, and how the user names it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.features.encoders.preprocessing import Preprocessing, centred

POOLS = ("auto", "pooler", "class", "mean")
KINDS = ("timm", "transformers", "torchvision")


@dataclass(frozen=True)
class Wish:
    """An encoder as the user names it.

    Attributes:
        name: `KIND:NAME`, or `package.Class`.
        weights: a file of weights; None takes those that the name stands for.
        arguments: of the network.
        pool: what of the output of a network of transformers is taken, one of `POOLS`.
        download: fetch what is not on this machine.
        crop: crop as the encoder's own transform does; else whole tiles are resized.
        size, mean, std, interpolation: in place of what the encoder says.
        tile_size: of the tiles, where it is known.
        whole: maps of whole regions in place of a vector a tile.
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
        """That of the encoder, with what the user says otherwise.

        Args:
            found: of the encoder, with the crop of its own transform.
        """
        size = self.size or found.size
        resized, offset = None, 0
        if self.crop:
            if found.resized is None or found.resized < found.size:
                raise ValueError(
                    f"--crop: the own transform of {self.name} does not crop; leave it out"
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
        network: takes images (N, 3, size, size), gives features (N, width); of whole regions it
            takes images of any size, and gives maps (N, width, rows, columns).
        preprocessing: what is done to tiles before.
        weights: where they come from, in words.
    """

    network: nn.Module
    preprocessing: Preprocessing
    weights: str

    def digest(self) -> str:
        """SHA-256 of all weights and buffers, with their names."""
        found = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            found.update(name.encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(data.numpy())
        return found.hexdigest()

    @torch.inference_mode()
    def width(self) -> int:
        """Numbers of a tile, found with an empty image.

        Raises:
            ValueError: the network does not take such images, or gives something else.
        """
        side = self.preprocessing.size
        try:
            found = self.network(torch.zeros(1, 3, side, side))
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"the encoder does not take images of {side} x {side}: "
                f"{str(error).partition(chr(10))[0]}; --input-size says another size"
            ) from error
        return int(found.shape[1])


class Features(nn.Module):
    """A network whose output is checked to be features.

    Args:
        network: gives (N, width), or (N, width, 1, 1).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, width)."""
        return as_features(self.network(images), len(images))


def as_features(found: object, count: int) -> Tensor:
    """An output as (count, width).

    Raises:
        ValueError: it has another shape, or is no tensor.
    """
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the encoder gives a {type(found).__name__}, expected a tensor (tiles, width)"
        )
    if found.dim() == 4 and found.shape[2:] == (1, 1):
        found = found.flatten(1)
    if found.dim() != 2 or len(found) != count:
        raise ValueError(
            f"the encoder gives {list(found.shape)} for {count} images, expected (tiles, width): "
            "it must end with one vector an image"
        )
    return found
