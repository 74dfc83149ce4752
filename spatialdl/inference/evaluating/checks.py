"""Configuration checks of an evaluation before ranks start; does not import PyTorch."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.common.configuring.values import check_values
from spatialdl.data.tables import SAMPLE, SlideTable, find_predicted, read_table
from spatialdl.inference.predicting.checks import CUTTING, check_config, check_whole
from spatialdl.layout.placement import Placement
from spatialdl.training.checks import check_choices
from spatialdl.training.layouts import placement_of

AGGREGATIONS = ("mean", "median", "max", "vote")
TABLES = ("predictions", "volumes", "confusion", "slides")
"""Names of the tables of predictions."""
_PREDICTING = {
    **dict.fromkeys((*CUTTING, "split", "tta", "precision", "memory_limit_gb", "classes")),
    **dict.fromkeys(("maps", "spatialdata", "activation"), False),
    **{"average": True, "batch_size": 8, "geojson": "plain"},
}
"""Keys that do not apply to predictions, with their defaults."""


def check_evaluation(config: DictConfig) -> Placement:
    """Check the configuration, and compute the ranks that it needs.

    Raises:
        ValueError: the configuration is invalid.
    """
    check_choices(config, {"aggregation": AGGREGATIONS})
    _check_numbers(config)
    if config.predictions is None:
        placement = check_config(config)
        if config.shards is None and config.labels is None:
            raise ValueError(
                "slides, volumes and features do not contain labels: give labels=FILE.csv"
            )
    else:
        placement = _check_predictions(config)
    _check_labels(config)
    check_values(config)
    return placement


def read_labels(file: Path) -> SlideTable:
    """Read a table of labels: a row per slide or image, or volume or sample if that is column 1.

    Raises:
        ValueError: the file is not such a table.
    """
    return read_table(file, first=("volume", SAMPLE))


def _check_predictions(config: DictConfig) -> Placement:
    """Check that predictions exist, and that no input to predict is given."""
    for key in ("ckpt_path", "slides", "volumes", "features", "shards"):
        if not OmegaConf.is_missing(config, key) and config[key] is not None:
            raise ValueError(
                f"predictions={config.predictions} and {key}={config[key]} are exclusive: leave "
                "one of them out"
            )
    for key, default in _PREDICTING.items():
        if config[key] != default:
            raise ValueError(
                f"{key}={config[key]} is for predicting, but predictions={config.predictions} are "
                "there already: leave it out"
            )
    folder = Path(config.predictions).expanduser()
    if not any(find_predicted(folder, name) for name in TABLES):
        raise ValueError(
            f"predictions={config.predictions} has no predictions.csv or slides.csv: give the "
            "directory of a run of spatialdl.predict (its hydra.run.dir)"
        )
    placement = placement_of(config.parallel)
    if placement.world_size > 1:
        raise ValueError(
            f"parallel={config.parallel.name} needs {placement.world_size} ranks, but evaluating "
            "predictions=... uses a single process: leave it out"
        )
    return placement


def _check_labels(config: DictConfig) -> None:
    groups = config.subgroups
    if not isinstance(groups, ListConfig):
        raise ValueError(f"subgroups={groups} must be a list: write subgroups=[scanner,site]")
    if config.labels is None:
        if groups:
            raise ValueError(
                f"subgroups={list(groups)} are columns of a table of labels: give labels=FILE.csv"
            )
        return
    table = read_labels(Path(config.labels).expanduser())
    table.check_columns([str(name) for name in groups], " (subgroups)")


def _check_numbers(config: DictConfig) -> None:
    check_whole(config, dict.fromkeys(("bootstrap", "cases", "seed"), 0))
    part = config.confidence
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part < 1:
        raise ValueError(f"confidence={part} must lie between 0 and 1, such as 0.95")
