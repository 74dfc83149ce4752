"""Configuration checks before ranks are started, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.comm.waiting import check_timeout
from spatialdl.common.configuring.values import check_values
from spatialdl.data.normalisation import Normalisation
from spatialdl.layout.placement import Placement
from spatialdl.training.callbacks import callback_plugins
from spatialdl.training.checkpoints.folder import LATEST, candidates
from spatialdl.training.loggers import check_loggers
from spatialdl.training.progress import check_metric
from spatialdl.training.tasks.metric_names import own_metric_plugins

PRECISIONS = ("float32", "float64", "bf16-mixed", "fp16-mixed")
OF_WHOLE_WEIGHTS = ("LARS", "LAMB")
DEVICE_PATHS = ("auto", "nccl", "mpi", "host")
TASKS = ("classification", "multilabel", "regression", "segmentation", "survival")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
TRANSPORTS = ("auto", "mpi", "torch")
BACKENDS = (None, "mpi4py", "gloo", "nccl")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "trainer.precision": PRECISIONS,
    "task.name": TASKS,
    "comm.transport": TRANSPORTS,
    "comm.device_path": DEVICE_PATHS,
    "comm.backend": BACKENDS,
}


def check_config(config: DictConfig) -> Placement:
    """Check a configuration for errors that would occur on all ranks.

    Returns:
        The ranks that the configuration needs.

    Raises:
        ValueError: if the configuration is invalid.
    """
    from spatialdl.training.layouts import (
        check_batch,
        check_image,
        check_task,
        placement_of,
        repeats,
        schedule_of,
    )
    from spatialdl.training.virtual_tiles import check_virtual_tiles

    check_complete(config)
    if not isinstance(config.seed, int) or isinstance(config.seed, bool) or config.seed < 0:
        raise ValueError(f"seed={config.seed} must be a whole number of at least 0")
    check_choices(config, CHOICES)
    check_device(config.device)
    check_timeout(config.comm.timeout)
    if config.comm.backend is not None and not config.parallel.shard_state:
        raise ValueError(
            f"comm.backend={config.comm.backend} chooses what parallel.shard_state=true shards "
            "over; gradients are averaged over comm.transport and comm.device_path: remove it"
        )
    size, is_bags = config.data.image_size, config.data.name == "bags"
    dims = len(size) if isinstance(size, ListConfig) else 1 if is_bags else None
    placement = placement_of(config.parallel, dims)
    check_virtual_tiles(config, placement)
    accumulate = _check_trainer(config)
    if is_bags:
        accumulate = repeats(config, placement)
    _check_metrics(config)
    callback_plugins(config.trainer)
    _check_input(config)
    schedule = schedule_of(config.parallel, placement, accumulate)
    microbatches = schedule.microbatches // accumulate  # of one batch, as in the configuration
    if not is_bags:
        check_batch(config.data.batch_size, microbatches, placement)
    check_task(config.task, placement)
    check_loggers(config.get("logger") or {})
    if isinstance(size, ListConfig) and not is_bags:
        check_image(tuple(size), placement)
    _check_files(config)
    check_values(config)
    return placement


def check_complete(config: DictConfig) -> None:
    """Check that all keys have a value.

    Raises:
        ValueError: names the keys without one.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)} has no value: add {missing[0]}=...")


def check_choices(config: DictConfig, choices: Mapping[str, Sequence[object]]) -> None:
    """Check that keys have one of their known values.

    Raises:
        ValueError: names the known values.
    """
    for key, known in choices.items():
        value = OmegaConf.select(config, key)
        if not any(value is one or (isinstance(value, str) and value == one) for one in known):
            names = ", ".join("null" if one is None else str(one).lower() for one in known)
            raise ValueError(f"{key}={value} is not supported: use one of {names}")


def check_device(name: object) -> None:
    """Check a device type; unusual ones must be registered with PyTorch.

    Raises:
        ValueError: if PyTorch does not know the name.
    """
    if name in ("auto", "cpu", "cuda", "xpu"):
        return
    import torch  # also loads packages that register further devices

    with suppress(RuntimeError):
        if torch.device(str(name)).index is None:
            return
    raise ValueError(
        f"device={name} is not supported: use one of auto, cpu, cuda, xpu, or a device type that "
        "a package registers with PyTorch"
    )


def _check_files(config: DictConfig) -> None:
    """Check that input files exist."""
    if config.data.name == "shards" and not Path(config.data.path).expanduser().is_dir():
        raise ValueError(
            f"data.path={config.data.path} is not a folder: write a data set with spatialdl-tile "
            "(slides) or spatialdl-import (images, volumes, patches)"
        )
    labels, tiles = config.data.get("labels"), config.data.get("tiles")
    if labels is not None and not Path(labels).expanduser().is_file():
        raise ValueError(f"data.labels={labels} is not a file")
    if tiles is not None and not Path(tiles).expanduser().is_dir():
        raise ValueError(
            f"data.tiles={tiles} is not a folder: write a data set of tiles with spatialdl-tile"
        )
    if config.task.name == "survival" and config.data.name != "bags":
        raise ValueError(f"task=survival requires data=bags, got data={config.data.name}")
    if config.ckpt_path not in (None, LATEST):
        candidates(str(config.ckpt_path), Path())
    if config.weights is not None:
        check_weights_file(str(config.weights))
    targets = config.data.get("targets")
    if targets is not None and not Path(targets).expanduser().is_file():
        raise ValueError(f"data.targets={targets} is not a file")


def _check_metrics(config: DictConfig) -> None:
    """Check the metrics of the best checkpoint and of early stopping."""
    own = [one.name for one in own_metric_plugins(config.task)]
    for key in ("checkpoint.best", "early_stopping.metric"):
        metric = OmegaConf.select(config.trainer, key)
        slides = config.data.name == "shards"
        check_metric(metric, f"trainer.{key}", config.task.name, slides, own)


def _check_input(config: DictConfig) -> None:
    normalisation, channels = Normalisation.from_config(config.data), config.data.channels
    if isinstance(channels, int):
        normalisation.check_channels(channels)


def check_weights_file(name: str) -> None:
    """Check that a path of weights exists; names without a folder may be names of a hub.

    Raises:
        ValueError: if the name is clearly a path, and the file does not exist.
    """
    path = Path(name).expanduser()
    if "/" in name and path.suffix in WEIGHTS and not path.is_file():
        raise ValueError(f"weights={name}: there is no such file")


def _check_trainer(config: DictConfig) -> int:
    """Check the group ``trainer``; return the batches that a step accumulates."""
    settings = config.trainer
    _check_intervals(settings)
    clip, decay = settings.clip_norm, settings.ema
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"trainer.clip_norm={clip} must be above 0, or null")
    is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if decay is not None and not (is_number and 0 <= decay < 1):
        raise ValueError(f"trainer.ema={decay} must be at least 0 and below 1, or null")
    if settings.cudnn_benchmark and settings.deterministic:
        raise ValueError(
            "trainer.cudnn_benchmark=true may select other algorithms in the next run, but "
            "trainer.deterministic=true requires bitwise equal results: set only one of them"
        )
    accumulate = settings.accumulate
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"trainer.accumulate={accumulate} must be at least 1 batch")
    optimizer = str(config.optimizer["_target_"])
    if config.parallel.shard_state and optimizer.endswith(OF_WHOLE_WEIGHTS):
        raise ValueError(
            f"optimizer._target_={optimizer} needs the norms of whole weights, but "
            "parallel.shard_state=true leaves only a shard of each on a rank: use sgd or adamw"
        )
    return int(accumulate)


def _check_intervals(trainer: DictConfig) -> None:
    """Check intervals, patience and numbers of checkpoints."""
    numbers = {
        "validate_every": (trainer.validate_every, 1),
        "checkpoint.every_steps": (trainer.checkpoint.every_steps, 1),
        "early_stopping.patience": (trainer.early_stopping.patience, 1),
        "checkpoint.keep": (trainer.checkpoint.keep, 0),
    }
    units = {"checkpoint.keep": "checkpoints", "early_stopping.patience": "validation"}
    for key, (value, least) in numbers.items():
        if value is None and key not in units:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            unit = units.get(key, "step, or null")
            raise ValueError(f"trainer.{key}={value} must be at least {least} {unit}")


# --- number of classes, size of stored images


def number_of_classes(setting: int | None, names: Sequence[str], where: str) -> int:
    """Number of classes: as set, by default those of the data.

    Args:
        setting: ``data.num_classes``.
        names: names of the classes of the data.
        where: the data, for messages.

    Raises:
        ValueError: if fewer are set than the data has.
    """
    count = len(names) if setting is None else int(setting)
    if count < len(names):
        raise ValueError(
            f"data.num_classes={count}, but {where} has {len(names)} classes "
            f"({', '.join(names[:8])}): leave it out"
        )
    return count


def check_targets(setting: int | None, names: Sequence[str], where: str) -> None:
    """Check that a number of targets, or of labels of slides, is that of the data.

    Raises:
        ValueError: if another one is set.
    """
    if setting not in (None, len(names)):
        raise ValueError(
            f"data.num_classes={setting}, but {where} ({', '.join(names)}): leave it out"
        )


def check_dims(size: Sequence[int], stored: Sequence[int], where: str) -> None:
    """Check that ``data.image_size`` has as many numbers as the stored images have dims.

    Raises:
        ValueError: if it has not.
    """
    if len(size) != len(stored):
        raise ValueError(
            f"data.image_size={list(size)} has {len(size)} numbers, but the images of {where} have "
            f"{len(stored)} dims, such as {' x '.join(map(str, stored))}: set one number per dim"
        )


Size = tuple[int, ...]


def common_size(path: Path, sizes: Iterable[Size]) -> Size:
    """Size (rows, columns) shared by all images of a data set.

    Raises:
        ValueError: if the images differ in size.
    """
    different = sorted(set(sizes))
    if len(different) > 1:
        dims = ("slices", "rows", "columns")[-len(different[0]) :]
        raise ValueError(
            f"the images of {path} have {len(different)} different sizes, such as "
            f"{', '.join(' x '.join(map(str, size)) for size in different[:3])}, but a batch needs "
            f"one size: crop or pad them with data.image_size=[{','.join(dims)}]"
        )
    return different[0]


def check_stored_size(data: DictConfig, parallel: DictConfig) -> None:
    """Check the size of stored images before ranks are started.

    Args:
        data: group ``data`` of the configuration.
        parallel: group ``parallel`` of the configuration.

    Raises:
        ValueError: if images differ in size, or are too small for the layout.
    """
    from spatialdl.data.format import Manifest
    from spatialdl.data.samples import RegionSample
    from spatialdl.training.layouts import check_image, placement_of

    if data.name != "shards" or data.image_size is not None:
        return
    path = Path(data.path).expanduser()
    manifest = Manifest.load(path)
    size: Size | None = manifest.tile_size
    if size is None:
        splits = {data.split, data.validation_split} - {None}
        sizes = {
            sample.size
            for sample in manifest.samples
            if isinstance(sample, RegionSample) and (data.split is None or sample.split in splits)
        }
        if not sizes:
            return  # the loader raises an error that names the available splits
        size = common_size(path, sizes)
    check_image(size, placement_of(parallel, len(size)))
