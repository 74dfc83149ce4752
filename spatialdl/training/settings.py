"""The data and the device that a configuration names, and what is wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.bags import BagSource, BagViews
from spatialdl.data.image_source import ImageSource
from spatialdl.data.loader import check_workers
from spatialdl.data.normalisation import Normalisation, wants_statistics
from spatialdl.data.shards import ShardDataset
from spatialdl.data.statistics import statistics_of
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.data.synthetic_fractals import SyntheticFractals
from spatialdl.data.synthetic_masks import SyntheticMasks
from spatialdl.data.synthetic_targets import SyntheticTargets
from spatialdl.data.targets import set_targets
from spatialdl.data.views import Views
from spatialdl.data.volume_geometry import Geometry
from spatialdl.training.bag_sources import open_bags
from spatialdl.training.image_size import common_size
from spatialdl.training.own_data import open_own_data

log = logging.getLogger("spatialdl.data")

TARGETED = ("multilabel", "regression")
"""Tasks whose labels are columns of numbers."""

SURVIVAL_BINS = 4
"""Intervals of time of task=survival, where `data.num_classes` leaves them open."""

SYNTHETIC = ("synthetic", "fractals")
"""Values of `data=` that no folder belongs to."""


@dataclass(frozen=True)
class Sources:
    """The data of a run: training, validation (if any), and what the images are like.

    Attributes:
        image_size: that the network sees; stored images may have others.
        names: of the classes or targets.
        background: what lies beyond a stored image; None is white.
        seed: of the augmentation.
        normalisation: of the network's input.
        max_tiles: of a bag that the network sees while it trains; None: all.
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
        """Training images as the network sees them, augmented."""
        size, background, white = self.image_size, self.background, self.normalisation.scale
        if isinstance(self.train, BagSource):
            return BagViews(self.train, size, seed=self.seed, max_tiles=self.max_tiles)
        return Views(self.train, size, background, self.augmentation, self.seed, white)

    @property
    def validation_views(self) -> Views | None:
        """The centres of validation images, as they are."""
        if self.validation is None:
            return None
        if isinstance(self.validation, BagSource):
            return BagViews(self.validation, self.image_size)
        white = self.normalisation.scale
        return Views(self.validation, self.image_size, self.background, white=white)

    def described(self) -> dict[str, Any]:
        """What uses of the trained network need: classes, input, and how slides were cut."""
        found: dict[str, Any] = {
            "classes": list(self.names),
            "input": self.normalisation.described(self.channels, self.train_views.dtype),
        }
        if isinstance(self.train, ShardDataset):
            found["kind"] = self.train.kind
            found["made_with"] = dict(self.train.manifest.made_with)
            if self.train.kind == "volumes":
                found["geometry"] = Geometry.of(self.train.volumes()).described()
        return found


def open_sources(
    data: DictConfig, seed: int, task: str = "classification", loss: object = None
) -> Sources:
    """Open the data sets that a configuration names.

    Args:
        task: "classification" wants labels, "segmentation" masks, others ``data.targets``.
        loss: of the task, by which survival is a risk ("cox") or hazards.

    Raises:
        ValueError: if there are no labels or masks, or images of different sizes.
        ShardError: if a data set is missing or damaged.
    """
    check_workers(data.workers, data.prefetch)
    if data.name == "bags":
        return _bags(data, seed, task, loss)
    augmentation = Augmentation.from_config(data.augment)
    opened = {"dataset": _own, **dict.fromkeys(SYNTHETIC, _synthetic)}.get(data.name, _shards)
    sources = opened(data, seed, task)
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
    return sources


def resolve_statistics(data: DictConfig, world: Communicator) -> None:
    """Put numbers in place of ``data.mean=dataset`` and ``data.std=dataset``; all ranks call it.

    Raises:
        ValueError: see `data.statistics`.
        ShardError: the data set is missing or damaged.
    """
    if not wants_statistics(data):
        return
    source = ShardDataset(Path(data.path).expanduser(), data.split, io=data.io)
    found = statistics_of(source, data.split, world)
    white = Normalisation(scale=data.scale).white(source.dtype)
    source.close()
    for key, values in (("mean", found.mean), ("std", found.std)):
        data[key] = [value / white for value in values]


def _shards(data: DictConfig, seed: int, task: str) -> Sources:
    if data.name != "shards":
        known = f"shards, bags, dataset, {' or '.join(SYNTHETIC)}"
        raise ValueError(f"data={data.name} is unknown: take {known}")
    _check_targets(data, task)
    path = Path(data.path).expanduser()
    train = ShardDataset(path, data.split, io=data.io)
    validation = None
    if data.validation_split is not None and data.validation_split in train.splits:
        validation = ShardDataset(path, data.validation_split, io=data.io)
    elif data.validation_split is not None:
        # as information, which only rank 0 prints
        log.info("%s has no split %s: nothing to validate on", path, data.validation_split)
    both = [one for one in (train, validation) if one is not None]
    for source in both:
        _check_samples(source, path, task)
    size = _size(data.image_size)
    if size is None:
        size = common_size(path, (one.image_size(k) for one in both for k in range(len(one))))
    stored = train.image_size(0)
    if len(size) != len(stored):
        raise ValueError(
            f"data.image_size={list(size)} has {len(size)} numbers, but the images of {path} have "
            f"{len(stored)} dims, such as {' x '.join(map(str, stored))}: give one for each"
        )
    names: list[str] = []
    if task in TARGETED:
        names = set_targets(Path(data.targets).expanduser(), both, path, task == "multilabel")
    classes = len(names or train.classes) if data.num_classes is None else int(data.num_classes)
    if names and classes != len(names):
        raise ValueError(
            f"data.num_classes={classes}, but {data.targets} has {len(names)} targets "
            f"({', '.join(names)}): leave it out"
        )
    if classes < len(train.classes) and not names:
        raise ValueError(
            f"data.num_classes={classes}, but {path} has {len(train.classes)} classes "
            f"({', '.join(train.classes)}): leave it out"
        )
    if classes < 1:
        raise ValueError(f"the data set {path} names no classes: set data.num_classes")
    return Sources(train, validation, size, train.channels, classes, tuple(names or train.classes))


def _own(data: DictConfig, seed: int, task: str) -> Sources:
    own = open_own_data(data, seed, task, _size(data.image_size))
    return Sources(
        own.train, own.validation, own.image_size, own.channels, own.num_classes, own.names
    )


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
                f"data.num_classes={data.num_classes} are intervals of time, but task.loss=cox "
                "has a risk alone: leave one of the two out"
            )
        classes = int(data.num_classes)
    if classes != len(names) and task != "survival":
        raise ValueError(
            f"data.num_classes={classes}, but slides have {len(names)} classes or targets "
            f"({', '.join(names)}): leave it out"
        )
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
    """Refuse a task without its targets, or targets without their task."""
    if task in TARGETED and data.targets is None:
        raise ValueError(
            f"task={task} needs data.targets=FILE.csv: a column sample or slide, and one for each "
            "target"
        )
    if task not in TARGETED and data.targets is not None:
        raise ValueError(
            f"data.targets={data.targets} goes with task={' and '.join(TARGETED)}, not with {task}"
        )


def _synthetic(data: DictConfig, seed: int, task: str) -> Sources:
    if data.name == "fractals" and task != "segmentation":
        raise ValueError(f"data=fractals is for task=segmentation, got task={task}")
    size = _size(data.image_size)
    if size is None:
        raise ValueError("data.image_size is [rows,columns], got null")
    classes, channels = int(data.num_classes), int(data.channels)
    kind: Callable[..., SyntheticDataset] = SyntheticDataset
    if task == "segmentation":
        kind = SyntheticMasks if data.name == "synthetic" else SyntheticFractals
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
        raise ValueError(f"the data set {path} has no samples: nothing to train on")
    if task == "segmentation" and not source.has_masks:
        raise ValueError(
            f"the data set {path} has no masks: write it again with "
            "ShardWriter.add(..., mask=...), spatialdl-tile --whole --annotations or "
            "spatialdl-import volumes --masks, or take task=classification"
        )
    unlabelled = int((source.labels < 0).sum())
    if unlabelled and task == "classification":
        raise ValueError(
            f"{unlabelled} of {len(source)} samples of {path} have no label: write it again with "
            "labels (--labels, or of images a folder for each class), or choose a split with "
            "labels by data.split"
            + ", or take task=segmentation, which learns from its masks"
            * source.has_masks
        )


def _size(size: object) -> tuple[int, ...] | None:
    """[rows,columns] of a configuration, of volumes [slices,rows,columns]; None for null."""
    if size is None:
        return None
    sides = list(size) if isinstance(size, ListConfig) else []
    is_number = all(type(side) is int and side >= 1 for side in sides)
    if not 1 <= len(sides) <= 3 or not is_number:
        raise ValueError(
            f"data.image_size is [rows,columns], of volumes [slices,rows,columns], got {size}"
        )
    return tuple(sides)


def _background(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"data.background={value} must be a number, or null for white")
