"""Compatibility of a checkpoint with a run: settings that must match, others that are logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.common.text import without_passwords
from spatialdl.data.format import MANIFEST
from spatialdl.data.normalisation import DEFAULTS, Normalisation
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.reading import sha256

log = logging.getLogger("spatialdl.checkpoints")

_NOT_LOGGED = (
    *(
        "ckpt_path",
        "weights",
        "data.path",
        "data.targets",
        "data.features",
        "data.labels",
        "data.tiles",
    ),
    *("trainer.max_", "trainer.checkpoint", "trainer.trace", "trainer.report"),
)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Configuration as stored in checkpoints, without passwords in URLs."""
    settings: dict[str, Any] = without_passwords(OmegaConf.to_container(config, resolve=True))
    return settings


def identity(config: DictConfig) -> dict[str, Any]:
    """Settings that determine the samples of each step: images, pixel values and targets."""
    data = config.data
    settings = {
        "seed": int(config.seed),
        "task": str(config.task.name),
        "data.batch_size": int(data.batch_size),
        "data.image_size": list(data.image_size),
        "data.channels": int(data.channels),
        "data.num_classes": int(data.num_classes),
        **_input(data, int(data.channels)),
        "data": str(data.name),
        "optimizer._target_": str(config.optimizer["_target_"]),
    }
    if data.name == "dataset":
        settings["data.dataset._target_"] = str(data.dataset["_target_"])
    if data.name == "bags":
        return {**settings, **_bags(data)}
    if data.name != "shards":
        return {**settings, "data.samples": int(data.samples)}
    settings["data.split"] = str(data.split)
    settings["the manifest of data.path"] = sha256(Path(data.path).expanduser() / MANIFEST)
    if data.targets is not None:
        settings["the file data.targets"] = sha256(Path(data.targets).expanduser())
    return settings


def _bags(data: DictConfig) -> dict[str, Any]:
    """Settings that determine labels and tiles; feature files may have been moved."""
    if data.get("tiles_a_slide") is not None:
        drawn = ("slides", "tiles_a_slide", "tile_size")
        return {f"data.{key}": int(data[key]) for key in drawn}
    columns = data.columns
    settings = {
        "data.split": str(data.split),
        "data.max_tiles": data.max_tiles,
        "data.columns": list(columns) if isinstance(columns, ListConfig) else columns,
    }
    if data.labels is not None:
        settings["the file data.labels"] = sha256(Path(data.labels).expanduser())
    if data.get("tiles") is not None:
        settings["the manifest of data.tiles"] = sha256(Path(data.tiles).expanduser() / MANIFEST)
    return settings


def _input(data: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Normalisation in numbers, so that a name equals its numbers."""
    normalisation = Normalisation.from_config(data)
    mean, std = normalisation.by_channel(channels)
    return {"data.mean": mean, "data.std": std, "data.scale": normalisation.scale}


def check_same(content: Mapping[str, Any], config: DictConfig) -> None:
    """Check that samples and optimizer match a checkpoint; log other differences.

    Raises:
        CheckpointError: names the setting that differs.
    """
    before, now = content["identity"], identity(config)
    before = {**_input(DEFAULTS, before["data.channels"]), **before}
    different = [key for key in (*before, *now) if before.get(key) != now.get(key)]
    if different:
        key = different[0]
        raise CheckpointError(
            f"the checkpoint of step {content['step']} was trained with {key}={before.get(key)}, "
            f"but this run has {key}={now.get(key)}: use the same setting, or start a new run "
            "without ckpt_path"
        )
    slices = [c["parallel"]["microbatches"] * c["parallel"]["data"] for c in _both(content, config)]
    if slices[0] != slices[1]:
        log.warning(
            "batches are now split into %d slices (parallel.microbatches x parallel.data), before "
            "into %d: statistics of BatchNorm change",
            *(slices[1], slices[0]),
        )
    changes = [change for change in _changes(content, config) if not change.startswith(_NOT_LOGGED)]
    if changes:
        log.info("changed settings: %s", ", ".join(changes))


def _both(content: Mapping[str, Any], config: DictConfig) -> tuple[Any, Any]:
    before = content["config"]
    return {**before, "data": {**DEFAULTS, **before["data"]}}, settings_of(config)


def _changes(content: Mapping[str, Any], config: DictConfig) -> list[str]:
    before, now = map(_flat, _both(content, config))
    return [
        f"{key}={now.get(key)} (was {before.get(key)})"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
