"""The same predictions by tile, by slide and by patient."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.evaluating.predicted import Predicted
from spatialdl.evaluating.scores import ClassScores, LabelScores, NumberScores, PixelScores
from spatialdl.evaluating.survival_scores import SurvivalScores
from spatialdl.evaluating.truth import Truth
from spatialdl.text import counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
AnyScores = ClassScores | LabelScores | NumberScores | PixelScores | SurvivalScores


@dataclass(frozen=True)
class Level:
    """Samples of one kind with labels.

    Attributes:
        name: "tile", "slide", "patient" or "image".
        names: M of them; of tiles their slides.
        values: (M, classes); of segmentation int64 (M, classes, classes), pixels.
        truth: (M,) or (M, classes).
        units: M, what is resampled as a whole.
        slides: of each, those it is made of.
        rows: of each its row among the predictions, if it is one of them.
    """

    name: str
    task: str
    names: Sequence[str]
    values: npt.NDArray[Any]
    truth: npt.NDArray[Any]
    units: Sequence[str]
    slides: Sequence[Sequence[str]]
    rows: Ints | None = None

    def __len__(self) -> int:
        return len(self.names)

    def some(self, chosen: npt.NDArray[np.bool_]) -> Level:
        """Those that are chosen."""
        kept = np.flatnonzero(chosen).tolist()
        return Level(
            self.name,
            self.task,
            [self.names[n] for n in kept],
            self.values[chosen],
            self.truth[chosen],
            [self.units[n] for n in kept],
            [self.slides[n] for n in kept],
            None if self.rows is None else self.rows[chosen],
        )

    def scores(self) -> AnyScores:
        """Its metrics."""
        unit = numbered(self.units)
        if self.task == "segmentation":
            return PixelScores(self.values, unit)
        made: Any = {
            "classification": ClassScores,
            "multilabel": LabelScores,
            "survival": SurvivalScores,
        }
        found: AnyScores = made.get(self.task, NumberScores)(self.values, self.truth, unit)
        return found


@dataclass(frozen=True)
class Levels:
    """All levels that there are, the finest first.

    Attributes:
        unit: what is resampled.
        remarks: what was left out.
    """

    levels: Sequence[Level]
    unit: str
    remarks: Sequence[str]


def levels_of(predicted: Predicted, truth: Truth, aggregation: str) -> Levels:
    """Put tiles together to slides, and slides to patients, of whom each slide counts alike."""
    if predicted.task == "segmentation":
        return _of_images(predicted, truth)
    remarks = []
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(predicted.values).all(1))
    if not finite.all():
        bad = {predicted.slides[n] for n in np.flatnonzero(~finite).tolist()}
        remarks.append(
            f"{counted(int((~finite).sum()), 'prediction')} of {counted(len(bad), 'slide')} "
            "not finite, left out"
        )
    slides = [name for name, kept in zip(predicted.slides, finite, strict=True) if kept]
    rows = np.flatnonzero(finite)
    if not slides:
        return Levels([], "slide", remarks)
    several = len(set(slides)) < len(slides)
    unit = "patient" if truth.patients else "slide"
    if unit == "slide" and len(set(slides)) == 1 and several:
        unit = "tile"
        remarks.append("one slide only: tiles are resampled, intervals hold for this slide alone")
    values, labels = predicted.values[finite], truth.labels[finite]
    units = [truth.patients.get(name, name) for name in slides]
    if unit == "tile":
        units = [str(number) for number in range(len(slides))]
    tiles = Level(
        "tile", predicted.task, slides, values, labels, units, [[name] for name in slides], rows
    )
    levels = [tiles] if several else []
    by_slide = _grouped(tiles, "slide", slides, aggregation) if several else _as_slides(tiles)
    levels.append(by_slide)
    if truth.patients:
        owners = [truth.patients[name] for name in by_slide.names]
        levels.append(_grouped(by_slide, "patient", owners, aggregation))
    kept = []
    for level in levels:
        known = _known(level)
        if level.name != "tile":
            remarks += _mixed(level, known, truth, predicted)
        kept.append(level.some(known))
    return Levels([level for level in kept if len(level)], unit, remarks)


def numbered(names: Sequence[Hashable]) -> Ints:
    """Numbers from 0, in the order in which the names come."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _as_slides(tiles: Level) -> Level:
    """Slides of one image each are their images, whatever the aggregation."""
    return replace(tiles, name="slide")


def _of_images(predicted: Predicted, truth: Truth) -> Levels:
    assert predicted.pixels is not None
    names = list(predicted.slides)
    units = [truth.patients.get(name, name) for name in names]
    known = predicted.pixels.sum((1, 2)) > 0
    remarks = []
    if not known.all():
        remarks.append(f"{counted(int((~known).sum()), 'image')} without labelled pixels")
    level = Level(
        *("image", "segmentation", names, predicted.pixels, truth.labels, units),
        *([[name] for name in names], np.arange(len(names))),
    ).some(known)
    unit = "patient" if truth.patients else "image"
    return Levels([level] if len(level) else [], unit, remarks)


def _known(level: Level) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_]
    found = level.truth >= 0 if level.truth.ndim == 1 else ~np.isnan(level.truth).all(1)
    return found


def _mixed(
    level: Level, known: npt.NDArray[np.bool_], truth: Truth, predicted: Predicted
) -> list[str]:
    """Slides and patients that have no label, though something of them has one."""
    labels = truth.labels
    has = np.asarray(labels >= 0 if labels.ndim == 1 else ~np.isnan(labels).all(1))
    labelled = {name for name, one in zip(predicted.slides, has, strict=True) if one}
    bare = [
        n for n in np.flatnonzero(~known).tolist() if any(s in labelled for s in level.slides[n])
    ]
    if not bare:
        return []
    parts = {"slide": "tiles", "patient": "slides"}[level.name]
    some = counted(len(bare), level.name)
    return [f"{some} whose {parts} have several labels, left out by {level.name}"]


def _grouped(level: Level, name: str, owners: Sequence[str], aggregation: str) -> Level:
    """Samples put together by their owners."""
    number = numbered(owners)
    names = list(dict.fromkeys(owners))
    members = _members(number, len(names))
    values = _aggregated(level, number, members, aggregation)
    slides = [list(dict.fromkeys(s for n in group for s in level.slides[n])) for group in members]
    truth = np.stack([_common(level.truth[group]) for group in members]) if members else level.truth
    # tiles that are resampled each by itself are no units of slides
    units = [level.units[group[0]] if name == "slide" else owner for owner, group in
             zip(names, members, strict=True)]  # fmt: skip
    return Level(name, level.task, names, values, truth, units, slides)


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
    if aggregation == "vote" and level.name == "tile":  # patients: the mean share of votes
        if level.task == "classification":
            values = np.eye(values.shape[1])[values.argmax(1)]
        else:
            values = (values >= 0.5).astype(np.float64)
    sums = np.zeros((count, values.shape[1]))
    np.add.at(sums, number, values)
    return np.asarray(sums / np.bincount(number, minlength=count)[:, None])


def _common(labels: npt.NDArray[Any]) -> Any:
    """The label that all have of which one is known; -1 or NaN if they differ."""
    if labels.ndim == 1:
        known = np.unique(labels[labels >= 0])
        return known[0] if len(known) == 1 else np.int64(-1)
    least, most = (choose.reduce(labels, 0) for choose in (np.fmin, np.fmax))  # without NaN
    return np.where(least == most, least, np.nan)


def group_of(level: Level, facts: Mapping[str, Mapping[str, str]], column: str) -> list[str]:
    """The value of a column for each sample; several of a patient are "mixed"."""
    found = []
    for slides in level.slides:
        values = {facts.get(slide, {}).get(column, "") for slide in slides}
        found.append((values.pop() or "(none)") if len(values) == 1 else "(mixed)")
    return found
