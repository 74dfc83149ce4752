"""Metadata of a checkpoint's network: its configuration, classes and training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from spatialdl.comm.communicator import Communicator
from spatialdl.common import fields
from spatialdl.common.configuring.values import literal
from spatialdl.data.format import Manifest
from spatialdl.data.image_source import DTYPES
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.volume_geometry import Geometry
from spatialdl.errors import CheckpointError, ShardError
from spatialdl.training.checkpoints.folder import CONTENT, candidates
from spatialdl.training.checkpoints.reading import Checkpoint, first_whole, sha256
from spatialdl.training.checks import TASKS

BAGS = "bags"
"""`data=` of networks that take features of tiles."""

_MOST = 2**20  # of channels or classes
_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError)


@dataclass(frozen=True)
class Trained:
    """A trained network's metadata.

    Attributes:
        path: the checkpoint.
        step: training step of the checkpoint.
        digest: digest of the checkpoint's contents.
        config: configuration of the training run.
        classes: names of the classes or targets, one per output.
        kind: "tiles", "regions" or "volumes", if it was trained on shards.
        made_with: settings with which the training images were cut from slides.
        dtype: dtype of the training pixels; None if unknown.
        geometry: geometry of the training volumes.
    """

    path: Path
    step: int
    digest: str
    config: DictConfig
    classes: tuple[str, ...]
    kind: str | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)
    dtype: np.dtype[Any] | None = None
    geometry: Geometry = field(default_factory=Geometry)

    @property
    def task(self) -> str:
        return str(self.config.task.name)

    @property
    def image_size(self) -> tuple[int, ...]:
        """Size of the training images, (H, W), or (D, H, W) of volumes."""
        return tuple(map(int, self.config.data.image_size))

    @property
    def takes_volumes(self) -> bool:
        """Whether it was trained on volumes."""
        return len(self.image_size) == 3

    @property
    def takes_bags(self) -> bool:
        """Whether it was trained on slides as bags of features."""
        return bool(self.config.data.name == BAGS)

    @property
    def channels(self) -> int:
        return int(self.config.data.channels)

    @property
    def background(self) -> float | None:
        """Padding value beyond an image's edges; None is white."""
        value = self.config.data.background
        return None if value is None else float(value)

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of its input; the default if the checkpoint does not record it."""
        return Normalisation.from_config(self.config.data)

    def check_pixels(self, name: str, dtype: np.dtype[Any]) -> None:
        """Check that a `data.scale` set in training is valid for pixels of `dtype`.

        Raises:
            ValueError: the pixels have another dtype than those of training.
        """
        known, scale = self.dtype, self.normalisation.scale
        if scale is None or known is None or dtype == known or dtype.kind == known.kind == "f":
            return
        raise ValueError(
            f"{name} has pixels of {dtype}, but the network was trained on {known} with data.scale="
            f"{scale:g}: give images of {known}, or train again with data.scale=null, which "
            "scales each dtype by its largest value"
        )


def find_trained(ckpt_path: str, world: Communicator) -> Trained:
    """Read the metadata of the first undamaged checkpoint; collective over `world`.

    Raises:
        CheckpointError: there is none, or it does not record how the network is built.
    """
    return trained_in(first_whole(candidates(ckpt_path, Path()), world))


def trained_in(path: Path) -> Trained:
    """Read the metadata of a checkpoint, without its tensors.

    Raises:
        CheckpointError: it does not record how the network is built.
    """
    with Checkpoint(path) as checkpoint:
        content = checkpoint.content
    digest = sha256(path / CONTENT)  # which contains the digests of the other files
    try:
        config = literal(fields.table(content, "config"))
        _check_types(config)
        step, classes = fields.whole(content, "step"), int(config.data.num_classes)
        recorded = content.get("data") or _of_manifest(config)
        fields.table({"data": recorded}, "data")
        names = fields.texts({"classes": recorded.get("classes") or []}, "classes")[:classes]
        made_with = fields.table({"made_with": recorded.get("made_with") or {}}, "made_with")
        dtype = _dtype(recorded.get("input") or {})
        geometry = Geometry()
        if recorded.get("geometry") is not None:
            geometry = Geometry.parsed(fields.table(recorded, "geometry"))
    except (*_UNREADABLE, OmegaConfBaseException) as error:
        raise CheckpointError(
            f"{path} does not record how its network is built ({fields.missing(error)}): give a "
            "checkpoint of spatialdl.train"
        ) from error
    names = [*names, *map(str, range(len(names), classes))]
    named, kind = tuple(names), recorded.get("kind")
    return Trained(path, step, digest, config, named, kind, made_with, dtype, geometry)


def _dtype(recorded: Mapping[str, Any]) -> np.dtype[Any] | None:
    """Dtype of the training pixels; None for older checkpoints, which do not record it.

    Raises:
        ValueError: the recorded dtype is invalid.
    """
    name = fields.table({"input": recorded}, "input").get("dtype")
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype is {fields.shown(name)}, expected one of {', '.join(DTYPES)}")
    found: np.dtype[Any] = np.dtype(name)
    return found


def _check_types(config: DictConfig) -> None:
    """Validate the parts of a run's configuration that are read.

    Raises:
        ValueError, KeyError, TypeError: a value is missing or invalid.
    """
    data, trainer = (dict(config[group]) for group in ("data", "trainer"))
    for group, key in (("task", "name"), ("model", "_target_"), ("data", "name")):
        fields.text(config[group], key)
    if config.task.name not in TASKS:
        raise ValueError(f"task.name is {fields.shown(config.task.name)}")
    for key in ("channels", "num_classes"):
        if fields.whole(data, key, 1) > _MOST:
            raise ValueError(f"data.{key} is {data[key]}")
    for side in tuple(data["image_size"]):
        fields.whole({"data.image_size": side}, "data.image_size", 1)
    if len(data["image_size"]) not in ((1,) if data["name"] == BAGS else (2, 3)):
        raise ValueError(f"data.image_size is {data['image_size']}")
    channels = data.get("tile_channels") or data["channels"]  # of bags of pixels, those of a tile
    Normalisation.from_config(data).check_channels(channels)
    background = None if data["name"] == BAGS else data["background"]
    if background is not None and type(background) not in (int, float):
        raise ValueError(f"data.background is {fields.shown(background)}")
    fields.text(trainer, "precision")
    for key in ("tf32", "deterministic"):
        fields.flag(trainer, key)


def _of_manifest(config: DictConfig) -> dict[str, Any]:
    """Metadata from the data set's manifest, if it still exists; for older checkpoints."""
    path = config.data.get("path")
    if path is None or config.data.get("targets") is not None:
        return {}
    try:
        manifest = Manifest.load(Path(path).expanduser())
    except ShardError:
        return {}
    return {
        "classes": manifest.classes,
        "kind": manifest.kind,
        "made_with": manifest.made_with,
    }
