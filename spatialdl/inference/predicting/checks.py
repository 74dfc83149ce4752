"""Configuration checks that run before ranks start; does not import PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from spatialdl.comm.waiting import check_timeout
from spatialdl.common.configuring.own_keys import is_own_network
from spatialdl.common.configuring.values import check_values
from spatialdl.common.packages import needed
from spatialdl.layout.placement import Placement
from spatialdl.slides.reading.resolution import PLAUSIBLE_MPP, is_plausible
from spatialdl.training.checkpoints.folder import CONTENT, LATEST, candidates
from spatialdl.training.checks import (
    BACKENDS,
    DEVICE_PATHS,
    PRECISIONS,
    TRANSPORTS,
    check_choices,
    check_complete,
    check_device,
)
from spatialdl.training.layouts import AUTO, check_image, placement_of, schedule_of

TABLES = ("csv", "parquet")
GEOJSON = {"plain": ".geojson", "gzip": ".geojson.gz"}
"""File endings of tiles and regions."""
CUTTING = (
    *("tile_size", "mpp", "level", "overlap", "min_tissue", "slide_mpp", "whole"),
    *("edge", "stain_reference"),
)
"""Keys that configure how slides are cut."""
_DIMS = {"features": 1, "volumes": 3, "slides": 2}
"""Spatial dims of inputs; slides beside features are drawn on, not predicted."""
_LEAST = {"tile_size": 1, "level": 0, "overlap": 0}
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": (None, *PRECISIONS),
    "table": TABLES,
    "geojson": tuple(GEOJSON),
    "spatialdata": (True, False),
    "whole": (None, True, False),
    "tta": (None, "flips", "d4"),
    "comm.transport": TRANSPORTS,
    "comm.device_path": DEVICE_PATHS,
    "comm.backend": BACKENDS,
}


def check_config(config: DictConfig) -> Placement:
    """Check the configuration, and compute the ranks that it needs.

    Raises:
        ValueError: the configuration is invalid.
    """
    check_complete(config)
    if str(config.ckpt_path) == LATEST:
        raise ValueError("ckpt_path=latest needs a run: give the run's directory")
    candidates(str(config.ckpt_path), Path())
    check_choices(config, CHOICES)
    check_device(config.device)
    if config.table == "parquet":
        needed("pyarrow.parquet", "parquet", "table=parquet")
    check_timeout(config.comm.timeout)
    _check_input(config)
    _check_numbers(config)
    parallel = config.parallel
    _refuse(
        {
            "parallel=auto is for training: give a layout, such as parallel=dp": (
                parallel.name == "auto"
            ),
            "parallel.shard_state=true is for training: leave it out": parallel.shard_state,
            "parallel.stream=auto is for training: give the virtual tiles, such as "
            "parallel.stream=[4,4]": parallel.stream == AUTO,
            "activation=true needs maps, but maps=false is set: leave one of them out": (
                config.activation and not config.maps
            ),
            f"activation=true explains the prediction of one image, but tta={config.tta} "
            "averages several: leave one of them out": config.activation and config.tta is not None,
        }
    )
    given = (key for key in _DIMS if config[key] is not None)
    dims = _DIMS.get(next(given, ""))  # of data sets the checkpoint knows it
    placement = placement_of(config.parallel, dims)
    if config.features is not None and placement.world_size > placement.data:
        raise ValueError(
            f"parallel={config.parallel.name} splits networks or images, but bags of features "
            "are not split: use parallel=none or parallel=dp"
        )
    schedule = schedule_of(config.parallel, placement)
    least = schedule.microbatches * placement.data * placement.most_batch_parts
    one_at_a_time = config.whole or config.volumes is not None or config.features is not None
    if config.batch_size < least and not one_at_a_time:
        raise ValueError(
            f"batch_size={config.batch_size} leaves ranks without tiles: {placement.describe()}, "
            f"parallel.microbatches={schedule.microbatches} need at least batch_size={least}"
        )
    if config.tile_size is not None:
        check_image((config.tile_size, config.tile_size), placement)
    if config.spatialdata:
        _check_store(config)
    _check_virtual_tiles(config, placement)
    check_values(config)
    return placement


def _refuse(wrong: Mapping[str, Any]) -> None:
    """Refuse a configuration of which something is wrong, by message.

    Raises:
        ValueError: something is.
    """
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)


def _check_virtual_tiles(config: DictConfig, placement: Placement) -> None:
    stream = config.parallel.stream
    _refuse(
        {
            f"activation=true is not supported with virtual tiles, parallel.stream={stream}: leave "
            "one of them out": placement.stream and config.activation,
            f"parallel.stream={stream} splits images, but features={config.features} has none: "
            "leave it out": placement.stream and config.features is not None,
        }
    )
    given = {
        "memory_limit_gb": config.memory_limit_gb,
        "parallel.stream_to": config.parallel.stream_to,
    }
    for key, value in given.items():
        if value is not None and not placement.stream:
            raise ValueError(
                f"{key}={value} has no effect without virtual tiles: set parallel.stream, such as "
                "parallel.stream=[4,4], or leave it out"
            )


def _check_store(config: DictConfig) -> None:
    if not config.maps:
        raise ValueError(
            "spatialdata=true needs maps, but maps=false is set: leave one of them out"
        )
    for key in ("volumes", "features"):
        if config[key] is not None:
            raise ValueError(
                f"spatialdata=true stores maps of slides, but {key}={config[key]} is given: leave "
                "it out"
            )
    if find_spec("spatialdata") is None:  # without the slow import
        raise ValueError(
            "spatialdata=true needs spatialdata: pip install 'spatialdl[spatialdata]', or leave it "
            "out"
        )


def names_own_network(ckpt_path: str) -> bool:
    """Whether a checkpoint's network is user code; False if the checkpoint is damaged."""
    try:
        content = json.loads((candidates(ckpt_path, Path())[0] / CONTENT).read_text("utf-8"))
        return is_own_network(content["config"]["model"]["_target_"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _check_input(config: DictConfig) -> None:
    for key in ("features", "volumes"):
        if config[key] is not None and config.geojson != "plain":
            raise ValueError(
                f"geojson={config.geojson} is for polygons of slides, not of {key}: leave it out"
            )
    if config.features is not None:
        _check_bags(config)
        return
    given = [key for key in ("slides", "volumes", "shards") if config[key] is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none"
        raise ValueError(
            "expected exactly one input of slides=..., volumes=..., shards=... and features=..., "
            f"got {what}"
        )
    if given == ["shards"] and not Path(config.shards).expanduser().is_dir():
        raise ValueError(f"shards={config.shards} is not a folder")
    if given != ["slides"]:
        for key in CUTTING:
            if config[key] is not None:
                raise ValueError(
                    f"{key} configures how slides are cut, but {given[0]} are not cut: leave it out"
                )
    if given != ["shards"] and config.split is not None:
        raise ValueError(
            f"split={config.split} selects from shards=..., {given[0]} have none: leave it out"
        )


def _check_bags(config: DictConfig) -> None:
    """Check `features=`; `slides=` may be given as well, to draw heat maps over them."""
    for key in ("volumes", "shards", "split", *CUTTING, "activation", "tta", "classes"):
        if config[key] not in (None, False):
            raise ValueError(
                f"{key}={config[key]} is for images, but features=... are already computed: "
                "leave it out"
            )


def _check_numbers(config: DictConfig) -> None:
    check_whole(config, {"batch_size": 1})
    given = {key: least for key, least in _LEAST.items() if config[key] is not None}
    check_whole(config, given)
    for key in ("mpp", "slide_mpp"):
        value = config[key]
        if value is not None and not (_is_number(value) and is_plausible(value)):
            low, high = PLAUSIBLE_MPP
            raise ValueError(f"{key}={value} must be micrometres per pixel, {low} to {high}")
    part = config.min_tissue
    is_part = part is None or (_is_number(part) and 0 <= part <= 1)
    classes = config.classes
    _refuse(
        {
            f"mpp={config.mpp} and level={config.level} are exclusive: leave one out": (
                config.mpp is not None and config.level is not None
            ),
            f"min_tissue={part} must lie between 0 and 1": not is_part,
            f"trust={config.trust} must be a list: write trust=[package.Class]": (
                not isinstance(config.trust, ListConfig)
            ),
            f"classes={classes} must be a list: write classes=[...]": (
                classes is not None and not isinstance(classes, ListConfig)
            ),
        }
    )


def check_whole(config: DictConfig, least: Mapping[str, int]) -> None:
    """Check that keys are whole numbers of at least these.

    Raises:
        ValueError: a key is not.
    """
    for key, number in least.items():
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < number:
            raise ValueError(f"{key}={value} must be a whole number of at least {number}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
