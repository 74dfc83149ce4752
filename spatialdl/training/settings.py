"""The data and the device that a configuration names, and what is wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig

from spatialdl.data.loader import ImageSource
from spatialdl.data.shards import ShardDataset
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.data.synthetic_masks import SyntheticMasks
from spatialdl.data.synthetic_targets import SyntheticTargets
from spatialdl.data.targets import set_targets

log = logging.getLogger("spatialdl.data")

TARGETED = ("multilabel", "regression")
"""Tasks whose labels are columns of numbers."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Sources:
    """The data of a run: training, validation (if any), and what the images are like.

    Attributes:
        names: of the classes or targets.
    """

    train: ImageSource
    validation: ImageSource | None
    image_size: tuple[int, int]
    channels: int
    num_classes: int
    names: tuple[str, ...] = ()


def open_sources(data: DictConfig, seed: int, task: str = "classification") -> Sources:
    """Open the data sets that a configuration names.

    Args:
        task: "classification" wants labels, "segmentation" masks, others ``data.targets``.

    Raises:
        ValueError: if there are no labels or masks, or images of different sizes.
        ShardError: if a data set is missing or damaged.
    """
    if data.name == "synthetic":
        return _synthetic(data, seed, task)
    if data.name != "shards":
        raise ValueError(f"data={data.name} is unknown: take synthetic or shards")
    _check_targets(data, task)
    path = Path(data.path).expanduser()
    train = ShardDataset(path, data.split, io=data.io)
    validation = None
    if data.validation_split is not None and data.validation_split in train.splits:
        validation = ShardDataset(path, data.validation_split, io=data.io)
    elif data.validation_split is not None:
        # as information, which only rank 0 prints
        log.info("%s has no split %s: nothing to validate on", path, data.validation_split)
    for source in (train, validation):
        if source is not None:
            _check_samples(source, path, task)
    size = train.image_size(0)
    if data.image_size is not None and tuple(data.image_size) != size:
        raise ValueError(
            f"data.image_size={list(data.image_size)}, but the images of {path} are "
            f"{size[0]}x{size[1]}: leave it out, or tile the slides again"
        )
    names: list[str] = []
    if task in TARGETED:
        both = [one for one in (train, validation) if one is not None]
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
    if not isinstance(data.image_size, ListConfig) or len(data.image_size) != 2:
        raise ValueError(f"data.image_size is [rows,columns], got {data.image_size}")
    size = (int(data.image_size[0]), int(data.image_size[1]))
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
        raise ValueError(f"the data set {path} has no samples: nothing to train on")
    if task == "segmentation" and not source.has_masks:
        raise ValueError(
            f"the data set {path} has no masks: write it again with "
            "ShardWriter.add(..., mask=...), or take task=classification"
        )
    unlabelled = int((source.labels < 0).sum())
    if unlabelled and task == "classification":
        raise ValueError(
            f"{unlabelled} of {len(source)} samples of {path} have no label: write it again with "
            "--labels, or choose a split with labels by data.split"
        )
    sizes = {source.image_size(sample) for sample in range(len(source))}
    if len(sizes) > 1:
        raise ValueError(
            f"the images of {path} have {len(sizes)} different sizes, such as {sorted(sizes)[:3]}: "
            "one batch needs one size"
        )


def device_of(name: str) -> torch.device:
    """The device of this rank; which GPU was chosen when the rank started."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here: take device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())
