"""Data sets of the user, set by ``data.dataset._target_``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.comm.communicator import Communicator
from spatialdl.common.configuring.plugins import Plugin, plugins_of
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.image_source import ImageSource
from spatialdl.data.sample_forms import SampleForm, shown
from spatialdl.training.checks import check_dims, number_of_classes

log = logging.getLogger("spatialdl.data")

_SOURCE = ("read", "image_size", "labels", "channels", "has_masks", "classes", "__len__")
"""Attributes of an `ImageSource`."""

_MOST_WRAPPERS = 8


def open_own_data(
    data: DictConfig, seed: int, task: str, image_size: tuple[int, ...] | None
) -> tuple[ImageSource, ImageSource | None, tuple[int, ...], int, int, tuple[str, ...]]:
    """Create the data sets of a configuration and inspect their first samples.

    Args:
        data: group ``data`` of the configuration.
        seed: seed of the data sets' random numbers.
        task: name of the task.
        image_size: size set in the configuration, if any.

    Returns:
        Training and validation samples, size, channels and classes of the images, class names.

    Raises:
        ValueError: if a data set cannot be created or its samples have an unknown form.
    """
    form = _form(data, task, image_size)
    transforms = _transforms(data, "transforms")
    train = _source(data.dataset, "data.dataset", form, seed, transforms)
    settings = validation_settings(data)
    validation = None
    if settings is not None:
        transforms = _transforms(data, "validation_transforms")
        validation = _source(settings, "data.validation", form, seed, transforms)
        _check_alike(train, validation)
    stored = tuple(train.image_size(0))
    size = stored if image_size is None else image_size
    check_dims(size, stored, "data.dataset")
    channels = int(train.channels)
    if data.channels is not None and data.channels != channels:
        raise ValueError(
            f"data.channels={data.channels}, but the images of data.dataset have {channels}: leave "
            "it out, or set data.channel_dim"
        )
    names = tuple(map(str, train.classes))
    classes = _num_classes(data, train, names, task)
    for source in (train, validation):
        if isinstance(source, DatasetSource):
            source.expect(classes, size if image_size is None else None)
    return train, validation, size, channels, classes, names


def validation_settings(data: DictConfig) -> DictConfig | None:
    """Settings of the validation data set: its own, or ``data.dataset`` with changed arguments."""
    settings = data.validation
    if settings is None:
        return None
    if not isinstance(settings, DictConfig):
        raise ValueError(
            f"data.validation={settings} is not a data set: set data.validation._target_, or "
            "arguments that differ from those of data.dataset, such as data.validation.split=val"
        )
    if settings.get("_target_") not in (None, data.dataset["_target_"]):
        return settings
    both = data.dataset, settings
    plain: list[Any] = [OmegaConf.to_container(one, resolve=True) for one in both]
    return OmegaConf.create({**plain[0], **plain[1]})


def check_same_samples(train: ImageSource, world: Communicator, split: bool) -> None:
    """Check that a data set returns the same samples on all ranks and each time; collective.

    Args:
        train: the training samples.
        world: all ranks.
        split: whether several ranks read one image.

    Raises:
        ValueError: on all ranks, if it does not.
    """
    if not isinstance(train, DatasetSource):
        return
    own = len(train), train.digest(0, 0), train.digest(0, 0)
    gathered = world.allgather(own)
    others = [rank for rank, one in enumerate(gathered) if one[0] != gathered[0][0]]
    if others:
        raise ValueError(
            f"{train.name} has {gathered[others[0]][0]} samples on rank {others[0]}, "
            f"{gathered[0][0]} on rank 0: use identical copies of the data set"
        )
    changes = (
        f"{train.name} returns a different first sample each time: it uses a random generator that "
        "cannot be seeded; use those of torch, numpy.random or random, or store the generator in "
        "an attribute"
    )
    if len({digest for one in gathered for digest in one[1:]}) > 1:
        if any(one[1] != one[2] for one in gathered):
            if world.size > 1:
                raise ValueError(changes)
            log.warning("%s; this run is not reproducible", changes)
            return
        raise ValueError(
            f"{train.name} returns different first samples on different ranks for the same seed, "
            "epoch and index: use identical copies of the data set"
        )
    if split and world.rank == 0:
        log.info(
            "%s: each rank of a grid loads whole samples and keeps its part; data sets of "
            "spatialdl-import or spatialdl.data.ShardWriter are read in parts",
            train.name,
        )


def _form(data: DictConfig, task: str, image_size: tuple[int, ...] | None) -> SampleForm:
    keys, channel_dim = data["keys"], data.channel_dim  # `keys` is a method, too
    if keys is not None:
        pair = list(keys) if isinstance(keys, ListConfig) else []
        kinds = {type(key) for key in pair}
        if len(pair) != 2 or kinds not in ({str}, {int}) or (kinds == {int} and min(pair) < 0):
            raise ValueError(
                f"data.keys={keys} must be [image,target], two keys of a dict or indices of a tuple"
            )
        keys = pair[0], pair[1]
    if channel_dim not in (None, "first", "last"):
        raise ValueError(f"data.channel_dim={channel_dim} must be first, last or null")
    dims = None if image_size is None else len(image_size)
    return SampleForm(task, keys, channel_dim, dims)


def _transforms(data: DictConfig, key: str) -> list[Callable[..., Any]]:
    plugins = plugins_of(data[key], f"data.{key}", "{_target_: package.Transform}")
    transforms = [plugin.make() for plugin in plugins]
    for one in transforms:
        if not callable(one):
            raise ValueError(f"data.{key} creates {shown(one)}, which is not callable")
    return transforms


def _source(
    settings: DictConfig,
    key: str,
    form: SampleForm,
    seed: int,
    transforms: Sequence[Callable[..., Any]],
) -> ImageSource:
    target = str(settings["_target_"])
    made = Plugin(key, target, target, settings).make()
    name = f"{key} ({target})"
    # a source that reads boxes cannot apply transforms of whole images
    if not transforms and all(hasattr(made, word) for word in _SOURCE):
        if form.task == "segmentation" and not made.has_masks:
            raise ValueError(f"{name} has no masks, but task=segmentation needs them")
        return made  # type: ignore[no-any-return]
    classes = _class_names(made, form)
    return DatasetSource(made, form, name=name, seed=seed, classes=classes, transforms=transforms)


def _class_names(dataset: Any, form: SampleForm) -> list[str]:
    """Class names of a torchvision or Hugging Face data set, also within wrappers."""
    for one in _wrapped(dataset):
        names = getattr(one, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
        features = getattr(one, "features", None)
        if isinstance(features, Mapping):
            key = form.keys[1] if form.keys else "label"
            names = getattr(features.get(key), "names", None)
            if isinstance(names, list | tuple):
                return list(map(str, names))
    return []


def _wrapped(dataset: Any) -> Iterator[Any]:
    for _ in range(_MOST_WRAPPERS):
        if dataset is None:
            return
        yield dataset
        dataset = getattr(dataset, "dataset", None)  # of a `Subset`


def _num_classes(data: DictConfig, train: ImageSource, names: tuple[str, ...], task: str) -> int:
    count = None if data.num_classes is None else int(data.num_classes)
    if task in ("multilabel", "regression"):
        labels = train.no_labels if isinstance(train, DatasetSource) else train.labels
        if labels.ndim != 2:
            raise ValueError(f"task={task} needs labels (samples, targets), got {labels.shape}")
        if count not in (None, labels.shape[1]):
            raise ValueError(
                f"data.num_classes={count}, but the targets of data.dataset have {labels.shape[1]} "
                "numbers: leave it out"
            )
        return int(labels.shape[1])
    if count is None and not names:
        raise ValueError("data.dataset has no attribute classes: set data.num_classes")
    if not number_of_classes(count, names, "data.dataset"):
        raise ValueError("data.num_classes=0 must be at least 1")
    return number_of_classes(count, names, "data.dataset")


def _check_alike(train: ImageSource, validation: ImageSource) -> None:
    for name in ("channels", "dtype"):
        here, there = getattr(train, name, None), getattr(validation, name, None)
        if here != there:
            raise ValueError(
                f"the images of data.validation have {name} {there}, those of data.dataset {here}: "
                "they must be equal"
            )
