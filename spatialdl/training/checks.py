"""Configuration checks before ranks are started, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.comm.limit import check_timeout
from spatialdl.configuring.values import check_values
from spatialdl.data.normalisation import Normalisation
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.layout_checks import check_compilable
from spatialdl.training.best import check_metric
from spatialdl.training.callbacks import callback_plugins
from spatialdl.training.checkpoints.folder import LATEST, candidates
from spatialdl.training.loggers.choosing import check_loggers
from spatialdl.training.tasks.metric_names import own_metric_plugins

PRECISIONS = ("float32", "float64", "bf16-mixed", "fp16-mixed")
OF_WHOLE_WEIGHTS = ("LARS", "LAMB")
DEVICE_PATHS = ("auto", "nccl", "mpi", "host")
TASKS = ("classification", "multilabel", "regression", "segmentation", "survival")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
BALANCES = ("time", "measured", "memory")
TRANSPORTS = ("auto", "mpi", "torch")
BACKENDS = (None, "mpi4py", "gloo", "nccl")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "trainer.precision": PRECISIONS,
    "task.name": TASKS,
    "comm.transport": TRANSPORTS,
    "comm.device_path": DEVICE_PATHS,
    "comm.backend": BACKENDS,
    "parallel.balance": BALANCES,
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
    if config.trainer.compile:
        check_compilable(
            placement,
            config.parallel.recompute,
            config.parallel.shard_state,
            config.comm.timeout,
            bool(config.trainer.deterministic),
        )
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
    from spatialdl.training.checkpoints.settings import check_settings

    settings = config.trainer
    check_settings(settings)
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
