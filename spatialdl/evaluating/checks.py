"""Mistakes in the configuration of an evaluation, found before ranks start. No PyTorch here."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from spatialdl.configuring.values import check_values
from spatialdl.data.predicted_table import find_predicted
from spatialdl.data.slide_table import SlideTable, read_table
from spatialdl.parallel.placement import Placement
from spatialdl.predicting.checks import check_config
from spatialdl.training.checks import check_choices
from spatialdl.training.layouts import placement_of

AGGREGATIONS = ("mean", "median", "max", "vote")
SAMPLE = "sample"
"""Column of the numbers of samples in their data set, from 0."""
TABLES = ("predictions", "volumes", "confusion", "slides")
"""Names of the tables that predictions are read from."""


def check_evaluation(config: DictConfig) -> Placement:
    """The ranks that a configuration needs.

    Raises:
        ValueError: it cannot be evaluated.
    """
    check_choices(config, {"aggregation": AGGREGATIONS})
    _check_numbers(config)
    if config.predictions is None:
        placement = check_config(config)
        if config.shards is None and config.labels is None:
            raise ValueError(
                "slides, volumes and features have no labels of their own: give labels=FILE.csv"
            )
    else:
        placement = _check_predictions(config)
    _check_labels(config)
    check_values(config)
    return placement


def read_labels(file: Path) -> SlideTable:
    """A table of labels: a row a slide, or where its first column says so, a volume or sample.

    Raises:
        ValueError: it is none.
    """
    return read_table(file, ("volume", SAMPLE))


def _check_predictions(config: DictConfig) -> Placement:
    """That there are predictions, and nothing else is given to predict."""
    for key in ("ckpt_path", "slides", "volumes", "features", "shards"):
        if not OmegaConf.is_missing(config, key) and config[key] is not None:
            raise ValueError(
                f"predictions={config.predictions} and {key}={config[key]} are both given: what "
                "was predicted is evaluated as it is, leave one of them out"
            )
    folder = Path(config.predictions).expanduser()
    if not any(find_predicted(folder, name) for name in TABLES):
        raise ValueError(
            f"predictions={config.predictions} has no predictions.csv or slides.csv: name the "
            "directory of a run of spatialdl.predict (its hydra.run.dir)"
        )
    placement = placement_of(config.parallel)
    if placement.world_size > 1:
        raise ValueError(
            f"parallel={config.parallel.name} predicts over {placement.world_size} ranks, but with "
            "predictions=... nothing is predicted: leave it out"
        )
    return placement


def _check_labels(config: DictConfig) -> None:
    groups = config.subgroups
    if not isinstance(groups, ListConfig):
        raise ValueError(f"subgroups={groups} is a list of columns: write subgroups=[scanner,site]")
    if config.labels is None:
        if groups:
            raise ValueError(
                f"subgroups={list(groups)} are columns of a table of slides: give labels=FILE.csv"
            )
        return
    table = read_labels(Path(config.labels).expanduser())
    for name in groups:
        if str(name) not in table.columns:
            raise ValueError(
                f"subgroups={list(groups)}: {config.labels} has no column {name}, but "
                f"{', '.join(table.columns)}"
            )


def _check_numbers(config: DictConfig) -> None:
    for key in ("bootstrap", "cases", "seed"):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key}={value} must be a whole number of at least 0")
    part = config.confidence
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part < 1:
        raise ValueError(f"confidence={part} must lie between 0 and 1, such as 0.95")
