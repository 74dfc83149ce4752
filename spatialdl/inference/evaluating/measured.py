"""Metrics of an evaluation by level and group, with bootstrap confidence intervals.

Whole units are drawn with replacement, since tiles of a slide and slides of a patient are
correlated: the cluster bootstrap of Davison and Hinkley (1997), Bootstrap Methods and their
Application, section 3.8. Intervals are percentiles of the resampled metric (section 5.3 there).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from spatialdl.common.files import save_json, save_table
from spatialdl.inference.evaluating.levels import Level, Levels, group_of
from spatialdl.inference.evaluating.scores import Floats, PixelScores, Scores
from spatialdl.training.console.validation_table import SHARES

ALL = "all"
"""Name of the group of all samples."""

_MOST_GROUPS = 30  # values of a column; more suggest a continuous variable
_SHARES = (*SHARES, "recall", "precision", "average_precision", "dice", "iou", "calibration_error")
_OF_IMAGES = ("image_dice", "image_iou")
_HEADS = (
    *("level", "group", "value", "metric", "class", "estimate", "low", "high"),
    *("samples", "units", "unit"),
)


_CELLS = 2**23  # weights in memory at a time
_LEAST = 0.5  # share of resamples that must define a metric for it to have an interval


class Interval(NamedTuple):
    """The limits of a confidence interval, NaN if there is none."""

    low: float
    high: float


class Resampling(NamedTuple):
    """Settings of the bootstrap.

    Attributes:
        resamples: number of resamples; 0 for no intervals.
        confidence: share of resamples between the limits.
        seed: seed of the draws.
    """

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """A metric of a group of samples; NaN where undefined.

    Attributes:
        level: name of the `Level`, such as "tile".
        group: a column of the labels, or "all".
        value: value of the column.
        metric: name as in training, without the suffix `_per_class` or `_per_target`.
        name: name of the class or target; empty for all together.
        samples, units: number of samples and of resampling units.
    """

    level: str
    group: str
    value: str
    metric: str
    name: str
    estimate: float
    interval: Interval
    samples: int
    units: int


def measure(
    levels: Levels,
    classes: Sequence[str],
    how: Resampling,
    facts: Mapping[str, Mapping[str, str]],
    subgroups: Sequence[str],
) -> list[Measured]:
    """Compute the metrics of all levels, and of subgroups by the values of columns.

    Raises:
        ValueError: a column has too many values.
    """
    found: list[Measured] = []
    for level in levels.levels:
        found += _of_level(level, classes, how, ALL, "")
    for column in subgroups:
        for level in levels.levels:
            values = group_of(level, facts, column)
            names = sorted(set(values))
            if len(names) > _MOST_GROUPS:
                raise ValueError(
                    f"subgroups=[{column}] has {len(names)} values, more than {_MOST_GROUPS}: "
                    "give a categorical column, such as the scanner"
                )
            for name in names:
                chosen = level.some(np.array([value == name for value in values]))
                found += [
                    one for one in _of_level(chosen, classes, how, column, name) if not one.name
                ]
    return found


def _of_level(
    level: Level, classes: Sequence[str], how: Resampling, group: str, value: str
) -> Iterator[Measured]:
    scores = level.scores()
    limits = intervals(scores, how, f"{level.name} {value}".strip())
    for metric, estimates in point(scores).items():
        plain, _, by = metric.partition("_per_")
        names = classes if by else [""]
        for name, estimate, limit in zip(
            names, np.atleast_1d(estimates).tolist(), limits[metric], strict=True
        ):
            yield Measured(
                *(level.name, group, value, plain, name, estimate, limit),
                *(scores.samples, scores.units),
            )


def shown_value(one: Measured) -> str:
    """The printed value, such as "91.2 % [88.0, 93.9]"; "-" if undefined."""
    share = one.metric in (*_SHARES, *_OF_IMAGES)

    def text(value: float) -> str:
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f}" if share else f"{value:.4g}"

    estimate = text(one.estimate)
    if share and estimate != "-":
        estimate += " %"
    low, high = map(text, one.interval)
    return f"{estimate} {'[-]' if low == '-' else f'[{low}, {high}]'}"


def save_metrics(
    folder: Path, found: Sequence[Measured], levels: Levels, summary: Mapping[str, Any]
) -> None:
    """Write metrics.csv and metrics.json."""
    rows = (
        (
            *(one.level, one.group, one.value, one.metric, one.name),
            *map(_cell, (one.estimate, *one.interval)),
            *(one.samples, one.units, levels.unit),
        )
        for one in found
    )
    save_table(folder / "metrics.csv", _HEADS, rows, errors="backslashreplace")
    tree: dict[str, Any] = {"levels": {}, "subgroups": {}}
    for one in found:
        top = tree["levels"] if one.group == ALL else tree["subgroups"].setdefault(one.group, {})
        if one.group != ALL:
            top = top.setdefault(one.value, {})
        place = top.setdefault(one.level, {"samples": one.samples, "units": one.units})
        cell = {
            "estimate": _cell(one.estimate),
            "low": _cell(one.interval.low),
            "high": _cell(one.interval.high),
        }
        if one.name:
            place.setdefault("per_class", {}).setdefault(one.metric, {})[one.name] = cell
        else:
            place[one.metric] = cell
    for level in levels.levels:
        tree["levels"][level.name] |= _confusion(level)
    save_json(folder / "metrics.json", {**summary, "unit": levels.unit, **tree})


def _confusion(level: Level) -> dict[str, Any]:
    scores = level.scores()
    if not hasattr(scores, "confusion"):
        return {}
    pairs = scores.confusion(np.ones((1, scores.units)))[0]
    key = "pixels" if isinstance(scores, PixelScores) else "confusion_matrix"
    return {key: pairs.astype(np.int64).tolist()}


def _cell(value: float) -> float | None:
    return None if math.isnan(value) else value


# --- intervals


def point(scored: Scores) -> dict[str, Floats]:
    """Point estimates of the metrics, each () or (classes,)."""
    return {name: found[0] for name, found in scored.metrics(np.ones((1, scored.units))).items()}


def intervals(scored: Scores, how: Resampling, title: str = "") -> dict[str, list[Interval]]:
    """Confidence intervals of every metric, one per class where it has several.

    Intervals are NaN with fewer than two units, or if fewer than half of the resamples define the
    metric.
    """
    names = point(scored)
    if how.resamples == 0 or scored.units < 2:
        none = Interval(np.nan, np.nan)
        return {name: [none] * np.size(value) for name, value in names.items()}
    found: dict[str, list[Floats]] = {name: [] for name in names}
    with tqdm(total=how.resamples, desc=title, unit="resample", delay=2, leave=False) as bar:
        for weights in draw_weights(scored, how):
            for name, values in scored.metrics(weights).items():
                found[name].append(values.reshape(len(weights), -1))
            bar.update(len(weights))
    return {name: _limits(np.concatenate(parts), how) for name, parts in found.items()}


def draw_weights(scored: Scores, how: Resampling) -> Iterator[Floats]:
    """Iterate over weights (resamples, units): how often each unit is drawn."""
    rng = np.random.default_rng(how.seed)
    units = scored.units
    at_once = max(1, _CELLS // max(units, scored.samples))
    for first in range(0, how.resamples, at_once):
        many = min(at_once, how.resamples - first)
        yield np.stack(
            [np.bincount(rng.integers(units, size=units), minlength=units) for _ in range(many)]
        ).astype(np.float64)


def _limits(values: Floats, how: Resampling) -> list[Interval]:
    tail = 100 * (1 - how.confidence) / 2
    limits = []
    for column in values.T:
        known = column[np.isfinite(column)]
        if len(known) < _LEAST * len(column):
            limits.append(Interval(np.nan, np.nan))
            continue
        low, high = np.percentile(known, (tail, 100 - tail))
        limits.append(Interval(float(low), float(high)))
    return limits
