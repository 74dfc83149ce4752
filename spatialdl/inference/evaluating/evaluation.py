"""Evaluation of predictions: metrics, pictures and a report.

metrics.csv, metrics.json   every metric with its interval, by level, group and class
cases.csv                   the worst predicted tiles, slides and patients
roc.png, ...                pictures
report.html                 all of these on one page
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.common.pages import as_data, save_page
from spatialdl.common.text import aligned, fitted
from spatialdl.inference.evaluating.cases import (
    Case,
    CasePictures,
    config_of,
    save_cases,
    worst_cases,
)
from spatialdl.inference.evaluating.levels import Levels, levels_of
from spatialdl.inference.evaluating.measured import (
    ALL,
    Measured,
    Resampling,
    measure,
    save_metrics,
    shown_value,
)
from spatialdl.inference.evaluating.pictures import save_pictures
from spatialdl.inference.evaluating.predicted import Predicted, read_predictions
from spatialdl.inference.evaluating.truth import find_truth
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.training.console.validation_table import metric_label

log = logging.getLogger("spatialdl.evaluate")

_LONGEST = 32  # columns of a group's name
_HEADLINE = ("mean_dice", "mean_iou", "auroc", "balanced_accuracy", "accuracy", "r2", "mae")
_MOST_FACTS = 3


def run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    """Predict, unless predictions are given, and evaluate; collective over `world`.

    Returns:
        Whether every slide was predicted.

    Raises:
        ValueError: the configuration, the labels and the predictions do not match.
    """
    succeeded = True
    if config.predictions is None:
        from spatialdl.inference.predicting.batch import run as predict

        succeeded = predict(config, run_dir, world)
    with agreeing(world):
        if world.rank == 0:
            evaluate(config, run_dir)
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
    rows = [["", *(f"by {level}" for level in levels)]]
    groups: dict[str, list[Measured]] = {}
    for one in found:
        group = "samples" if one.group == ALL else fitted(f"{one.group}={one.value}", _LONGEST)
        groups.setdefault(group, []).append(one)
    for group, own in groups.items():
        counts = {one.level: _many(one) for one in own}
        rows.append([group, *(counts.get(level, "") for level in levels)])
        inset = "" if group == "samples" else "  "
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for one in own:
            cells.setdefault((one.metric, one.name), {})[one.level] = shown_value(one)
        for (metric, name), values in cells.items():
            what = f"{inset}{metric_label(metric)}{', ' if name else ''}{fitted(name, _LONGEST)}"
            rows.append([what, *(values.get(level, "") for level in levels)])
    title = f"{100 * how.confidence:g} % intervals, {how.resamples:,} resamples by {unit}"
    return "\n".join([title, *aligned(rows)])


def _many(one: Measured) -> str:
    return f"{one.samples:,} of {one.units:,}" if one.units != one.samples else f"{one.samples:,}"


# --- the report


def save_evaluation(
    path: Path,
    found: Sequence[Measured],
    levels: Levels,
    cases: Sequence[Case],
    pictures: Mapping[str, Path],
    summary: Mapping[str, Any],
) -> None:
    """Write the page atomically.

    Args:
        found: all metrics.
        pictures: PNG files by title.
        summary: settings of the evaluation.
    """
    names = [level.name for level in levels.levels]
    plain = [one for one in found if one.group == ALL]
    save_page(
        path,
        __package__,
        summary=summary,
        unit=levels.unit,
        levels=len(names),
        facts=list(_facts(plain, names)),
        metrics=_table(
            [one for one in plain if not one.name],
            "metric",
            _metric,
            lambda one: f"by {one.level}",
        ),
        classes=list(_by_class(plain, names)),
        groups=list(_by_group(found, names)),
        pictures={title: as_data(file.read_bytes(), "png") for title, file in pictures.items()},
        cases={
            name: own for name in names if (own := [_shown(o) for o in cases if o.level == name])
        },
    )


def _facts(found: Sequence[Measured], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Headline metrics of the coarsest level, and sample counts of all levels."""
    own = {one.metric: one for one in found if one.level == names[-1] and not one.name}
    for metric in [name for name in _HEADLINE if name in own][:_MOST_FACTS]:
        yield f"{metric_label(metric)} by {names[-1]}", shown_value(own[metric])
    for name in names:
        yield f"{name}s", f"{next(o.samples for o in found if o.level == name):,}"


def _table(
    found: Sequence[Measured],
    head: str,
    row: Callable[[Measured], str],
    column: Callable[[Measured], str],
) -> list[list[str]]:
    """A table of values, with names of its rows and columns."""
    columns = list(dict.fromkeys(map(column, found)))
    cells: dict[str, dict[str, str]] = {}
    for one in found:
        cells.setdefault(row(one), {})[column(one)] = shown_value(one)
    rows = [[name, *(of.get(one, "") for one in columns)] for name, of in cells.items()]
    return [[head, *columns], *rows]


def _metric(one: Measured) -> str:
    return metric_label(one.metric)


def _by_class(found: Sequence[Measured], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table per level, with a row per class and a column per metric."""
    for level in names:
        own = [one for one in found if one.level == level and one.name]
        if own:
            yield {"title": level, "rows": _table(own, "", lambda one: one.name, _metric)}


def _by_group(found: Sequence[Measured], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table per column and level, with a row per value and a column per metric."""
    columns = [column for column in dict.fromkeys(one.group for one in found) if column != ALL]
    for column, level in product(columns, names):
        own = [one for one in found if (one.group, one.level) == (column, level)]
        counts = {one.value: f"{one.samples:,}" for one in own}
        [head, *rows] = _table(own, column, lambda one: one.value, _metric)
        if rows:
            rows = [[name, counts[name], *values] for name, *values in rows]
            head.insert(1, f"{level}s")
            yield {"title": f"{column}, by {level}", "rows": [head, *rows]}


def _shown(one: Case) -> dict[str, str]:
    place = "" if np.isnan(one.place[0]) else f"x {one.place[0]:.0f}, y {one.place[1]:.0f}"
    return {
        "name": one.name,
        "place": place if one.level == "tile" else "",
        "label": one.label,
        "predicted": one.predicted,
        "error": f"{one.error:.3f}",
        "picture": one.picture,
    }
