"""Whether a checkpoint is of this run: what must be equal, and what may differ but is said."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.data.format import MANIFEST
from spatialdl.data.normalisation import DEFAULTS, Normalisation
from spatialdl.errors import CheckpointError
from spatialdl.text import without_passwords
from spatialdl.training.checkpoints.reading import sha256

log = logging.getLogger("spatialdl.checkpoints")

_NOT_SAID = (
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
    """What a checkpoint keeps of a configuration: no passwords in addresses."""
    found: dict[str, Any] = without_passwords(OmegaConf.to_container(config, resolve=True))
    return found


def identity(config: DictConfig) -> dict[str, Any]:
    """What decides on the samples of each step: images, their values, and their targets."""
    data = config.data
    found = {
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
        found["data.dataset._target_"] = str(data.dataset["_target_"])
    if data.name == "bags":
        return {**found, **_bags(data)}
    if data.name != "shards":
        return {**found, "data.samples": int(data.samples)}
    folder = Path(data.path).expanduser()
    found |= {"data.split": str(data.split), "the manifest of data.path": sha256(folder / MANIFEST)}
    if data.targets is not None:
        found["the file data.targets"] = sha256(Path(data.targets).expanduser())
    return found


def _bags(data: DictConfig) -> dict[str, Any]:
    """What decides on labels and on the tiles seen; features may lie elsewhere by now."""
    if data.get("tiles_a_slide") is not None:
        drawn = ("slides", "tiles_a_slide", "tile_size")
        return {f"data.{key}": int(data[key]) for key in drawn}
    columns = data.columns
    found = {
        "data.split": str(data.split),
        "data.max_tiles": data.max_tiles,
        "data.columns": list(columns) if isinstance(columns, ListConfig) else columns,
    }
    if data.labels is not None:
        found["the file data.labels"] = sha256(Path(data.labels).expanduser())
    if data.get("tiles") is not None:
        found["the manifest of data.tiles"] = sha256(Path(data.tiles).expanduser() / MANIFEST)
    return found


def _input(data: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """In numbers, so that a name and its numbers are the same."""
    normalisation = Normalisation.from_config(data)
    mean, std = normalisation.by_channel(channels)
    return {"data.mean": mean, "data.std": std, "data.scale": normalisation.scale}


def check_same(content: Mapping[str, Any], config: DictConfig) -> None:
    """Refuse a checkpoint of other samples or another optimizer; say what else is different.

    Raises:
        CheckpointError: naming what must be equal.
    """
    before, now = content["identity"], identity(config)
    before = {**_input(DEFAULTS, before["data.channels"]), **before}
    different = [key for key in (*before, *now) if before.get(key) != now.get(key)]
    if different:
        key = different[0]
        raise CheckpointError(
            f"the checkpoint of step {content['step']} was trained with {key}={before.get(key)}, "
            f"this run has {key}={now.get(key)}: the losses would not go on; take the same, or "
            "start anew without ckpt_path"
        )
    slices = [c["parallel"]["microbatches"] * c["parallel"]["data"] for c in _both(content, config)]
    if slices[0] != slices[1]:
        log.warning(
            "batches are cut into %d slices from here on (parallel.microbatches x parallel.data), "
            "not into %d: BatchNorm sees other samples together",
            *(slices[1], slices[0]),
        )
    changes = [change for change in _changes(content, config) if not change.startswith(_NOT_SAID)]
    if changes:
        log.info("different from here on: %s", ", ".join(changes))


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
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
