"""The report of an evaluation, a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.evaluating.cases import Case
from spatialdl.evaluating.levels import Levels
from spatialdl.evaluating.measured import ALL, Measured, shown_name, shown_value
from spatialdl.pages.writing import as_data, save_page

_HEADLINE = ("mean_dice", "mean_iou", "auroc", "balanced_accuracy", "accuracy", "r2", "mae")
_MOST_FACTS = 3


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
        metrics=_table([one for one in plain if not one.name], names, "metric"),
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
        yield f"{shown_name(metric)} by {names[-1]}", shown_value(own[metric])
    for name in names:
        yield f"{name}s", f"{next(o.samples for o in found if o.level == name):,}"


def _table(found: Sequence[Measured], names: Sequence[str], head: str) -> list[list[str]]:
    """A table with a row per metric and a column per level."""
    metrics = list(dict.fromkeys(one.metric for one in found))
    cells = {(one.metric, one.level): shown_value(one) for one in found}
    rows = [[shown_name(m), *(cells.get((m, level), "") for level in names)] for m in metrics]
    return [[head, *(f"by {level}" for level in names)], *rows]


def _by_class(found: Sequence[Measured], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table per level, with a row per class and a column per metric."""
    for level in names:
        own = [one for one in found if one.level == level and one.name]
        metrics = list(dict.fromkeys(one.metric for one in own))
        classes = list(dict.fromkeys(one.name for one in own))
        cells = {(one.name, one.metric): shown_value(one) for one in own}
        rows = [[name, *(cells[name, metric] for metric in metrics)] for name in classes]
        if rows:
            yield {"title": level, "rows": [["", *map(shown_name, metrics)], *rows]}


def _by_group(found: Sequence[Measured], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table per column and level, with a row per value and a column per metric."""
    columns = [column for column in dict.fromkeys(one.group for one in found) if column != ALL]
    for column in columns:
        for level in names:
            own = [one for one in found if (one.group, one.level) == (column, level)]
            metrics = list(dict.fromkeys(one.metric for one in own))
            values = list(dict.fromkeys(one.value for one in own))
            cells = {(one.value, one.metric): one for one in own}
            rows = [
                [
                    value,
                    f"{cells[value, metrics[0]].samples:,}",
                    *(shown_value(cells[value, metric]) for metric in metrics),
                ]
                for value in values
            ]
            if rows:
                head = [column, f"{level}s", *map(shown_name, metrics)]
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
