"""Data sets of a run, opened from the configuration and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.bags import BagSource, BagViews
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.image_source import ImageSource
from spatialdl.data.loader import check_workers
from spatialdl.data.normalisation import Normalisation, wants_statistics
from spatialdl.data.shards import ShardDataset
from spatialdl.data.statistics import statistics_of
from spatialdl.data.synthetic import SyntheticDataset, SyntheticMasks, SyntheticTargets
from spatialdl.data.targets import set_targets
from spatialdl.data.views import Views
from spatialdl.data.volume_geometry import Geometry
from spatialdl.training.bag_sources import open_bags
from spatialdl.training.checks import (
    check_dims,
    check_targets,
    common_size,
    number_of_classes,
)
from spatialdl.training.layouts import check_image, placement_of
from spatialdl.training.own_data import open_own_data

log = logging.getLogger("spatialdl.data")

TARGETED = ("multilabel", "regression")
"""Tasks with columns of numbers as labels."""

SURVIVAL_BINS = 4
"""Time intervals of task=survival if `data.num_classes` is not set."""


@dataclass(frozen=True)
class Sources:
    """Data of a run: training, validation (if any), and properties of the images.

    Attributes:
        train: training samples.
        validation: validation samples, if any.
        image_size: size of the network's input; stored images may have other sizes.
        channels: channels of an image.
        num_classes: classes or targets.
        names: names of the classes or targets.
        augmentation: augmentation of training images.
        background: pixel value beyond a stored image; None is white.
        seed: seed of the augmentation.
        normalisation: normalisation of the network's input.
        max_tiles: maximum tiles of a bag in training; None is all.
    """

    train: ImageSource
    validation: ImageSource | None
    image_size: tuple[int, ...]
    channels: int
    num_classes: int
    names: tuple[str, ...] = ()
    augmentation: Augmentation = field(default_factory=Augmentation)
    background: float | None = None
    seed: int = 0
    normalisation: Normalisation = field(default_factory=Normalisation)
    max_tiles: int | None = None

    @property
    def train_views(self) -> Views:
        """Augmented training images as the network gets them."""
        size, background, white = self.image_size, self.background, self.normalisation.scale
        if isinstance(self.train, BagSource):
            return BagViews(self.train, size, seed=self.seed, max_tiles=self.max_tiles)
        return Views(self.train, size, background, self.augmentation, self.seed, white)

    @property
    def validation_views(self) -> Views | None:
        """Centre crops of validation images, without augmentation."""
        if self.validation is None:
            return None
        if isinstance(self.validation, BagSource):
            return BagViews(self.validation, self.image_size)
        white = self.normalisation.scale
        return Views(self.validation, self.image_size, self.background, white=white)

    def described(self) -> dict[str, Any]:
        """Metadata for inference: classes, input format, tiling parameters."""
        metadata: dict[str, Any] = {
            "classes": list(self.names),
            "input": self.normalisation.described(self.channels, self.train_views.dtype),
        }
        if isinstance(self.train, ShardDataset):
            metadata["kind"] = self.train.kind
            metadata["made_with"] = dict(self.train.manifest.made_with)
            if self.train.kind == "volumes":
                metadata["geometry"] = Geometry.of(self.train.volumes()).described()
        return metadata


def open_sources(
    data: DictConfig, seed: int, task: str = "classification", loss: object = None
) -> Sources:
    """Open the data sets that a configuration names.

    Args:
        data: group ``data`` of the configuration.
        seed: seed of synthetic data and augmentation.
        task: "classification" needs labels, "segmentation" masks, other tasks ``data.targets``.
        loss: loss of the task; survival predicts a risk with "cox", otherwise hazards.

    Raises:
        ValueError: if labels or masks are missing, or images differ in size.
        ShardError: if a data set is missing or damaged.
    """
    check_workers(data.workers)
    if data.name == "bags":
        return _bags(data, seed, task, loss)
    augmentation = Augmentation.from_config(data.augment)
    opener = {"dataset": _own, "synthetic": _synthetic}.get(data.name, _shards)
    sources = opener(data, seed, task)
    augmentation.check_channels(sources.channels)
    background = _background(data.background)
    normalisation = Normalisation.from_config(data)
    normalisation.check_channels(sources.channels)
    sources = replace(
        sources,
        augmentation=augmentation,
        background=background,
        seed=seed,
        normalisation=normalisation,
    )
    normalisation.check_pixels(sources.train_views.dtype)
    if background is not None:
        sources.train_views.check_background()
    if task == "classification":
        for source in (sources.train, sources.validation):
            _check_labels(source, sources.num_classes)
    return sources


def _check_labels(source: ImageSource | None, classes: int) -> None:
    """Check the labels that are stored; those of a user's samples are known as they are read."""
    if source is None or isinstance(source, DatasetSource) or not len(source.labels):
        return
    labels = np.asarray(source.labels)
    wrong = int(labels.max()) if labels.max() >= classes else int(labels.min())
    if not 0 <= wrong < classes:
        raise ValueError(
            f"a sample has class {wrong}, expected 0 to {classes - 1} (data.num_classes={classes}):"
            f" set data.num_classes={max(int(labels.max()) + 1, 1)}, or number classes from 0"
        )


def open_and_check(config: DictConfig) -> Sources:
    """Open the data sets before ranks start, and check the layout and some samples.

    Raises:
        ValueError: see `open_sources`; or if images do not fit the layout, or labels the number of
            classes.
    """
    sources = open_sources(config.data, int(config.seed), config.task.name, config.task.get("loss"))
    if not sources.train_views.varies:
        placement = placement_of(config.parallel, len(sources.image_size))
        check_image(sources.image_size, placement)
    for source in (sources.train, sources.validation):
        if isinstance(source, DatasetSource):
            source.probe()
    return sources


def resolve_statistics(data: DictConfig, world: Communicator) -> None:
    """Replace ``data.mean=dataset`` and ``data.std=dataset`` by numbers; collective.

    Raises:
        ValueError: see `data.statistics`.
        ShardError: if the data set is missing or damaged.
    """
    if not wants_statistics(data):
        return
    source = ShardDataset(Path(data.path).expanduser(), data.split)
    statistics = statistics_of(source, data.split, world)
    white = Normalisation(scale=data.scale).white(source.dtype)
    source.close()
    for key, values in (("mean", statistics.mean), ("std", statistics.std)):
        data[key] = [value / white for value in values]


def _shards(data: DictConfig, seed: int, task: str) -> Sources:
    if data.name != "shards":
        raise ValueError(f"data={data.name} is unknown: use shards, bags, dataset or synthetic")
    _check_targets(data, task)
    path = Path(data.path).expanduser()
    train = ShardDataset(path, data.split)
    validation = None
    if data.validation_split is not None and data.validation_split in train.splits:
        validation = ShardDataset(path, data.validation_split)
    elif data.validation_split is not None:
        # not a warning, since every rank would report it
        log.info("%s has no split %s: the run has no validation", path, data.validation_split)
    both = [one for one in (train, validation) if one is not None]
    for source in both:
        _check_samples(source, path, task)
    size = _size(data.image_size)
    if size is None:
        size = common_size(path, (one.image_size(k) for one in both for k in range(len(one))))
    check_dims(size, train.image_size(0), str(path))
    names = list(train.classes)
    if task in TARGETED:
        names = set_targets(Path(data.targets).expanduser(), both, path, task == "multilabel")
        check_targets(data.num_classes, names, f"{data.targets} has {len(names)} targets")
    classes = number_of_classes(data.num_classes, names, str(path))
    if classes < 1:
        raise ValueError(f"data set {path} has no class names: set data.num_classes")
    return Sources(train, validation, size, train.channels, classes, tuple(names))


def _own(data: DictConfig, seed: int, task: str) -> Sources:
    return Sources(*open_own_data(data, seed, task, _size(data.image_size)))


def _bags(data: DictConfig, seed: int, task: str, loss: object) -> Sources:
    train, validation, names = open_bags(data, seed, task)
    both = [one for one in (train, validation) if one is not None]
    longest = max(file.tiles for one in both for file in one.files)
    classes = len(names)
    if task == "survival":
        classes = 1 if loss == "cox" else SURVIVAL_BINS
    if data.num_classes is not None:
        if loss == "cox" and data.num_classes != 1:
            raise ValueError(
                f"data.num_classes={data.num_classes} sets time intervals, but task.loss=cox "
                "predicts a single risk: set only one of them"
            )
        classes = int(data.num_classes)
    if task != "survival":
        where = f"the slides have {len(names)} classes or targets"
        check_targets(data.num_classes, names, where)
    most = data.get("max_tiles")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"data.max_tiles={most} must be a whole number of at least 1, or null")
    normalisation = Normalisation.from_config(data)
    normalisation.check_channels(train.channels if train.tile is None else train.tile[0])
    if train.tile is not None:
        normalisation.check_pixels(train.dtype)
    return Sources(
        *(train, validation, (longest,), train.channels, classes, names),
        seed=seed,
        normalisation=normalisation,
        max_tiles=most,
    )


def _check_targets(data: DictConfig, task: str) -> None:
    """Check that targets are set if and only if the task needs them."""
    if task in TARGETED and data.targets is None:
        raise ValueError(
            f"task={task} needs data.targets=FILE.csv with a column sample or slide and one column "
            "per target"
        )
    if task not in TARGETED and data.targets is not None:
        raise ValueError(
            f"data.targets={data.targets} is for task={' or '.join(TARGETED)}, got task={task}"
        )


def _synthetic(data: DictConfig, seed: int, task: str) -> Sources:
    size = _size(data.image_size)
    if size is None:
        raise ValueError("data.image_size must be [rows,columns], got null")
    classes, channels = int(data.num_classes), int(data.channels)
    kind: Callable[..., SyntheticDataset] = SyntheticDataset
    if task == "segmentation":
        kind = SyntheticMasks
    elif task in TARGETED:
        kind = partial(SyntheticTargets, present=task == "multilabel")
    train = kind(int(data.samples), size, classes, channels, seed)
    validation = None
    if data.validation_samples:
        held_out = int(data.validation_samples)
        validation = kind(held_out, size, classes, channels, seed + 1)
    return Sources(train, validation, size, channels, classes, tuple(train.classes))


def _check_samples(source: ShardDataset, path: Path, task: str) -> None:
    if len(source) == 0:
        raise ValueError(f"data set {path} has no samples: nothing to train on")
    if task == "segmentation" and not source.has_masks:
        raise ValueError(
            f"data set {path} has no masks: write it again with "
            "ShardWriter.add(..., mask=...), spatialdl-tile --whole --annotations or "
            "spatialdl-import volumes --masks, or use task=classification"
        )
    unlabelled = int((source.labels < 0).sum())
    if unlabelled and task == "classification":
        raise ValueError(
            f"{unlabelled} of {len(source)} samples of {path} have no label: write it again with "
            "labels (--labels, or one folder of images per class), select a split with labels by "
            "data.split"
            + ", or use task=segmentation, which trains on its masks"
            * source.has_masks
        )


def _size(size: object) -> tuple[int, ...] | None:
    """Parse ``data.image_size``: (rows, columns), or (slices, rows, columns) for volumes."""
    if size is None:
        return None
    sides = list(size) if isinstance(size, ListConfig) else []
    is_number = all(type(side) is int and side >= 1 for side in sides)
    if not 1 <= len(sides) <= 3 or not is_number:
        raise ValueError(
            f"data.image_size must be [rows,columns], or [slices,rows,columns] for volumes, "
            f"got {size}"
        )
    return tuple(sides)


def _background(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"data.background={value} must be a number, or null for white")
