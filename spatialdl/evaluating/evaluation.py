"""Evaluation of predictions: metrics, pictures and a report.

metrics.csv, metrics.json   every metric with its interval, by level, group and class
cases.csv                   the worst predicted tiles, slides and patients
roc.png, ...                pictures
report.html                 all of these on one page
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.evaluating.cases import CasePictures, config_of, save_cases, worst_cases
from spatialdl.evaluating.levels import levels_of
from spatialdl.evaluating.measured import (
    ALL,
    Measured,
    measure,
    save_metrics,
    shown_name,
    shown_value,
)
from spatialdl.evaluating.page import save_evaluation
from spatialdl.evaluating.pictures import save_pictures
from spatialdl.evaluating.predicted import Predicted, read_predictions
from spatialdl.evaluating.resampling import Resampling
from spatialdl.evaluating.truth import find_truth
from spatialdl.text import aligned, fitted

log = logging.getLogger("spatialdl.evaluate")

_LONGEST = 32  # columns of a group's name


def run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    """Predict, unless predictions are given, and evaluate; collective over `world`.

    Returns:
        Whether every slide was predicted.

    Raises:
        ValueError: the configuration, the labels and the predictions do not match.
    """
    succeeded = True
    if config.predictions is None:
        from spatialdl.predicting.batch import run as predict

        succeeded = predict(config, run_dir, world)
    problem = None
    if world.rank == 0:
        try:
            evaluate(config, run_dir)
        except ValueError as error:
            problem = str(error)
    problem = world.bcast(problem)
    if problem is not None:
        raise ValueError(problem)
    return succeeded


def evaluate(config: DictConfig, run_dir: Path) -> None:
    """Compare the predictions of a directory with labels, and write the results.

    Raises:
        ValueError: they do not match.
    """
    folder = run_dir if config.predictions is None else Path(config.predictions).expanduser()
    predicted = read_predictions(folder)
    file = None if config.labels is None else Path(config.labels).expanduser()
    truth = find_truth(predicted, file)
    levels = levels_of(predicted, truth, str(config.aggregation))
    remarks = [*_failed(predicted), *truth.remarks, *levels.remarks]
    for remark in remarks:
        log.warning("%s", remark)
    if not levels.levels:
        raise ValueError(f"no predictions with labels: {'; '.join(remarks)}")
    how = Resampling(int(config.bootstrap), float(config.confidence), int(config.seed))
    groups = [str(name) for name in config.subgroups]
    found = measure(levels, predicted.classes, how, truth.facts, groups)
    made_by = config if config.predictions is None else config_of(folder)
    cases = worst_cases(levels.levels, predicted, int(config.cases), CasePictures(made_by))
    pictures = save_pictures(run_dir, levels.levels, predicted.classes, found)
    summary = _summary(config, predicted, how, remarks)
    save_metrics(run_dir, found, levels, summary)
    save_cases(run_dir / "cases.csv", cases)
    save_evaluation(run_dir / "report.html", found, levels, cases, pictures, summary)
    print(table(found, levels.unit, how))
    log.info("written: %s", run_dir / "report.html")


def _failed(predicted: Predicted) -> list[str]:
    return [f"{name}: {why}" for name, why in predicted.failed.items()]


def _summary(
    config: DictConfig, predicted: Predicted, how: Resampling, remarks: Sequence[str]
) -> Mapping[str, Any]:
    """The settings of the evaluation, as stored with its results."""
    keys = ("predictions", "slides", "volumes", "features", "shards", "split", "labels")
    given = {key: config[key] for key in keys if config[key] is not None}
    if config.predictions is None:
        given = {"ckpt_path": config.ckpt_path, **given}
    return {
        "task": predicted.task,
        "classes": list(predicted.classes),
        "of": {key: str(value) for key, value in given.items()},
        "aggregation": str(config.aggregation),
        "bootstrap": how.resamples,
        "confidence": how.confidence,
        "seed": how.seed,
        "remarks": list(remarks),
    }


def table(found: Sequence[Measured], unit: str, how: Resampling) -> str:
    """Console table: metrics of all samples, of classes, of groups; a column per level."""
    levels = list(dict.fromkeys(one.level for one in found))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in found:
        group = "" if one.group == ALL else f"{one.group}={one.value}"
        what = f"{shown_name(one.metric)}{', ' if one.name else ''}{fitted(one.name, _LONGEST)}"
        cells.setdefault((group, what, one.metric), {})[one.level] = shown_value(one)
    rows = [("", *(f"by {level}" for level in levels))]
    before = ""
    for (group, what, _), values in cells.items():
        if group != before:
            many = [next((_many(o) for o in found if _is(o, group, level)), "") for level in levels]
            rows.append((fitted(group, _LONGEST), *many))
            before = group
        inset = "  " if group else ""
        rows.append((f"{inset}{what}", *(values.get(level, "") for level in levels)))
    counts = [next((_many(o) for o in found if _is(o, "", level)), "") for level in levels]
    rows.insert(1, ("samples", *counts))
    title = f"{100 * how.confidence:g} % intervals, {how.resamples:,} resamples by {unit}"
    return "\n".join([title, *aligned(rows)])


def _is(one: Measured, group: str, level: str) -> bool:
    own = "" if one.group == ALL else f"{one.group}={one.value}"
    return own == group and one.level == level


def _many(one: Measured) -> str:
    return f"{one.samples:,} of {one.units:,}" if one.units != one.samples else f"{one.samples:,}"
