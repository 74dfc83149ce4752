"""Predictions aggregated by tile, slide and patient."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import counted
from spatialdl.inference.evaluating.predicted import Predicted
from spatialdl.inference.evaluating.scores import (
    ClassScores,
    LabelScores,
    NumberScores,
    PixelScores,
    Scores,
    SurvivalScores,
)
from spatialdl.inference.evaluating.truth import Truth

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_SCORES: dict[str, type[Scores]] = {
    "classification": ClassScores,
    "multilabel": LabelScores,
    "regression": NumberScores,
    "segmentation": PixelScores,
    "survival": SurvivalScores,
}


@dataclass(frozen=True)
class Level:
    """Labelled samples of one level of aggregation.

    Attributes:
        name: "tile", "slide", "patient", "image" or "volume".
        names: M names of the samples; of tiles those of their slides.
        values: (M, classes); for segmentation int64 (M, classes, classes), pixels.
        truth: (M,) or (M, classes).
        units: M names of the resampling units.
        keys: per sample, the keys of its members in the label table.
        rows: per sample its row in the predictions; None if samples are aggregated.
    """

    name: str
    task: str
    names: Sequence[str]
    values: npt.NDArray[Any]
    truth: npt.NDArray[Any]
    units: Sequence[str]
    keys: Sequence[Sequence[str]]
    rows: Ints | None = None

    def __len__(self) -> int:
        return len(self.names)

    def some(self, chosen: npt.NDArray[np.bool_]) -> Level:
        """The level restricted to the chosen samples."""
        kept = np.flatnonzero(chosen).tolist()
        return replace(
            self,
            names=[self.names[n] for n in kept],
            values=self.values[chosen],
            truth=self.truth[chosen],
            units=[self.units[n] for n in kept],
            keys=[self.keys[n] for n in kept],
            rows=None if self.rows is None else self.rows[chosen],
        )

    def scores(self) -> Scores:
        """The scores of the level, according to its task."""
        return _SCORES[self.task](self.values, self.truth, numbered(self.units))


@dataclass(frozen=True)
class Levels:
    """All levels with labelled samples, the finest first.

    Attributes:
        unit: kind of the resampling unit.
        remarks: what was left out.
    """

    levels: Sequence[Level]
    unit: str
    remarks: Sequence[str]


def levels_of(predicted: Predicted, truth: Truth, aggregation: str) -> Levels:
    """Aggregate tiles to slides, and slides to patients; slides of a patient weigh the same."""
    kept, remarks = _usable(predicted)
    rows = np.flatnonzero(kept)
    if not rows.size:
        return Levels([], predicted.whole, remarks)
    slides, names, keys = (
        [each[n] for n in rows.tolist()] for each in (predicted.slides, predicted.names, truth.keys)
    )
    patients = [truth.patients[n] for n in rows.tolist()] if truth.patients else []
    values = predicted.values if predicted.pixels is None else predicted.pixels
    several = len(set(slides)) < len(slides)
    part, whole = predicted.part, predicted.whole
    if predicted.pixels is not None and not several:
        whole = part
    unit, units = whole, slides
    if patients:
        unit, units = "patient", patients
    elif len(set(slides)) == 1 and several:
        unit = part
        units = [str(number) for number in range(len(slides))]
        remarks.append(
            f"only one {whole}: {part}s are resampled, so intervals hold for this {whole} only"
        )
    parts = Level(
        *(part, predicted.task, names, values[rows], truth.labels[rows], units),
        *([[key] for key in keys], rows),
    )
    levels = [parts] if several else [replace(parts, name=whole)]
    owners = patients
    if several and _are_shared(slides, patients):
        remarks.append(f"{whole}s have several patients: no metrics by {whole}")
    elif several:
        levels.append(_grouped(parts, whole, slides, aggregation))
        of_slides = dict(zip(slides, patients, strict=True)) if patients else {}
        owners = [of_slides[name] for name in levels[-1].names if patients]
    if patients:
        levels.append(_grouped(levels[-1], "patient", owners, aggregation))
    found = []
    for level in levels:
        known = _known(level)
        if level.rows is None:
            remarks += _mixed(level, known, levels[0])
        found.append(level.some(known))
    return Levels([level for level in found if len(level)], unit, remarks)


def _are_shared(slides: Sequence[str], patients: Sequence[str]) -> bool:
    """Whether a slide has samples of several patients."""
    return len(set(zip(slides, patients, strict=False))) > len(set(slides)) and bool(patients)


def _usable(predicted: Predicted) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Mask of the finite predictions, or of those with labelled pixels, and a remark."""
    if predicted.pixels is not None:
        kept: npt.NDArray[np.bool_] = predicted.pixels.sum((1, 2)) > 0
        why = "without labelled pixels"
    else:
        kept = np.asarray(np.isfinite(predicted.values).all(1))
        why = "not finite, left out"
    if kept.all():
        return kept, []
    count = int((~kept).sum())
    if predicted.pixels is not None:
        return kept, [f"{counted(count, 'image')} {why}"]
    bad = {predicted.slides[n] for n in np.flatnonzero(~kept).tolist()}
    of = counted(len(bad), predicted.whole)
    return kept, [f"{counted(count, 'prediction')} of {of} {why}"]


def numbered(names: Sequence[Hashable]) -> Ints:
    """Number names from 0 in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _known(level: Level) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_]
    if level.task == "survival":  # time and event are needed together
        return np.asarray(~np.isnan(level.truth).any(1))
    found = level.truth >= 0 if level.truth.ndim == 1 else ~np.isnan(level.truth).all(1)
    return found


def _mixed(level: Level, known: npt.NDArray[np.bool_], parts: Level) -> list[str]:
    """Remark on slides or patients without a common label, though members have labels."""
    pairs = zip(parts.keys, _known(parts), strict=True)
    labelled = {key for keys, one in pairs if one for key in keys}
    bare = [
        n for n in np.flatnonzero(~known).tolist() if any(key in labelled for key in level.keys[n])
    ]
    if not bare:
        return []
    part = parts.name if level.name != "patient" else "slide"
    some = counted(len(bare), level.name)
    return [f"{some} with {part}s of different labels, left out by {level.name}"]


def _grouped(level: Level, name: str, owners: Sequence[str], aggregation: str) -> Level:
    """Aggregate samples by owner."""
    number = numbered(owners)
    names = list(dict.fromkeys(owners))
    members = _members(number, len(names))
    units = [level.units[group[0]] for group in members]
    keys = [list(dict.fromkeys(s for n in group for s in level.keys[n])) for group in members]
    if level.task == "segmentation":
        values = np.stack([level.values[group].sum(0) for group in members])
    else:
        values = _aggregated(level, number, members, aggregation)
    truth = np.stack([_common(level.truth[group]) for group in members])
    return Level(name, level.task, names, values, truth, units, keys)


def _members(number: Ints, count: int) -> list[Ints]:
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number, minlength=count))
    return np.split(order, ends[:-1]) if count else []


def _aggregated(level: Level, number: Ints, members: Sequence[Ints], aggregation: str) -> Floats:
    values: Floats = level.values
    count = len(members)
    if aggregation in ("median", "max"):
        chosen: Any = np.median if aggregation == "median" else np.max
        return np.stack([chosen(values[group], axis=0) for group in members])
    if aggregation == "vote" and level.name in ("tile", "image"):  # slides: the mean of votes
        if level.task == "classification":
            values = np.eye(values.shape[1])[values.argmax(1)]
        else:
            values = (values >= 0.5).astype(np.float64)
    sums = np.zeros((count, values.shape[1]))
    np.add.at(sums, number, values)
    return np.asarray(sums / np.bincount(number, minlength=count)[:, None])


def _common(labels: npt.NDArray[Any]) -> Any:
    """The common known label; -1 or NaN if labels differ."""
    if labels.ndim == 1:
        known = np.unique(labels[labels >= 0])
        return known[0] if len(known) == 1 else np.int64(-1)
    least, most = (choose.reduce(labels, 0) for choose in (np.fmin, np.fmax))  # ignoring NaN
    return np.where(least == most, least, np.nan)


def group_of(level: Level, facts: Mapping[str, Mapping[str, str]], column: str) -> list[str]:
    """The value of a column for each sample; "(mixed)" if its members differ."""
    found = []
    for keys in level.keys:
        values = {facts.get(key, {}).get(column, "") for key in keys}
        found.append((values.pop() or "(none)") if len(values) == 1 else "(mixed)")
    return found
