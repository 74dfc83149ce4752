"""Labels, patients and groups of slides, from a CSV and from data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.common.text import counted
from spatialdl.data.tables import LABEL, SAMPLE
from spatialdl.data.targets import target_of
from spatialdl.inference.evaluating.checks import read_labels
from spatialdl.inference.evaluating.predicted import Predicted

Facts = Mapping[str, Mapping[str, str]]
_NAMED = 5  # names listed in a remark


@dataclass(frozen=True)
class Truth:
    """The ground truth of N predictions.

    Attributes:
        labels: int64 (N,), classes, -1 where unknown; or (N, targets), NaN where unknown.
        keys: N keys of `facts`: the slide, name or sample index of each prediction.
        facts: rows of the CSV by key.
        patients: N patients; empty if the CSV has no such column.
        remarks: what is missing.
    """

    labels: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    keys: Sequence[str]
    facts: Facts
    patients: Sequence[str]
    remarks: Sequence[str]


def find_truth(predicted: Predicted, file: Path | None) -> Truth:
    """Match predictions with labels.

    Args:
        file: table of labels, which replace those of the predictions.

    Raises:
        ValueError: the file does not match the predictions, or no label is known.
    """
    given = _Given.nothing(predicted) if file is None else _Given.read(file, predicted)
    remarks = list(given.remarks)
    patients: list[str] = []
    if given.patient is not None:  # a slide without patient counts as a separate patient
        pairs = zip(given.cells(given.patient), predicted.slides, strict=True)
        patients = [patient or f"{predicted.whole} {slide}" for patient, slide in pairs]
    known = given.keys, given.facts, patients
    if predicted.task == "segmentation":
        return Truth(np.zeros(len(predicted.slides), np.int64), *known, remarks)
    if predicted.task == "classification":
        labels = _classes(predicted, given)
        unknown_labels = labels < 0
    else:
        targets = _targets(predicted, given)
        labels, unknown_labels = targets, np.isnan(targets).all(1)  # type: ignore[assignment]
    if unknown_labels.all():
        raise ValueError(_no_label(predicted, given))
    bare = [key for key, none in zip(given.keys, unknown_labels, strict=True) if none]
    remarks += _listed("{} without a label, left out", given.what, bare)
    return Truth(labels, *known, remarks)


@dataclass(frozen=True)
class _Given:
    """A table of labels, matched with predictions.

    Attributes:
        file: the table, if there is one.
        what: kind of its rows, such as "slide".
        columns: columns of the table.
        patient: its column of patients, if there is one.
        keys, facts, remarks: as in `Truth`.
    """

    file: Path | None
    what: str
    columns: Sequence[str]
    patient: str | None
    keys: Sequence[str]
    facts: Facts
    remarks: Sequence[str]

    @classmethod
    def nothing(cls, predicted: Predicted) -> _Given:
        """An empty table, for labels from the predictions only."""
        return cls(None, predicted.whole, (), None, predicted.slides, {}, ())

    @classmethod
    def read(cls, file: Path, predicted: Predicted) -> _Given:
        """Read a table, and select the rows of the predictions.

        Raises:
            ValueError: the table is malformed, or its rows cannot be matched.
        """
        table = read_labels(file)
        if table.key == SAMPLE:
            if not predicted.samples:
                raise ValueError(
                    f"{file} has labels by {SAMPLE}, but the predictions have no column {SAMPLE}: "
                    "give labels by slide, or predict the data set again"
                )
            what, keys = SAMPLE, predicted.samples
            rows, unknown = table.match(keys)
        else:
            rows, unknown = table.match([*predicted.names, *predicted.slides, *predicted.failed])
            pairs = zip(predicted.names, predicted.slides, strict=True)
            what, keys = predicted.whole, [n if n in rows else slide for n, slide in pairs]
        facts = {name: row.cells for name, row in rows.items()}
        missing = [key for key in keys if key not in facts]
        remarks = _listed("{} of the labels without predictions", what, unknown)
        remarks += _listed(f"{{}} without a row in {file.name}", what, missing)
        return cls(file, what, table.columns, table.patient, keys, facts, remarks)

    def cells(self, column: str) -> list[str]:
        """A column's cell for each prediction, empty if there is no row."""
        return [self.facts.get(key, {}).get(column, "") for key in self.keys]


def _classes(predicted: Predicted, given: _Given) -> npt.NDArray[np.int64]:
    names: Sequence[str] = predicted.labels or [""] * len(predicted.slides)
    if LABEL in given.columns:
        names = given.cells(LABEL)
    numbers = {name: number for number, name in enumerate(predicted.classes)} | {"": -1}
    other = sorted({name for name in names if name not in numbers})
    if other:
        where = f"{given.file} has" if LABEL in given.columns else "the data set has"
        raise ValueError(
            f"{where} the label {other[0]!r}, but the network has the classes "
            f"{', '.join(predicted.classes)}: use the same names, or leave the cell empty"
        )
    return np.array([numbers[name] for name in names], np.int64)


def _targets(predicted: Predicted, given: _Given) -> npt.NDArray[np.float64]:
    file = given.file
    missing = [name for name in predicted.classes if name not in given.columns]
    if missing and predicted.targets is not None:
        return _both(predicted, predicted.targets)
    if missing:
        raise ValueError(
            f"task={predicted.task} needs the columns {', '.join(predicted.classes)} of "
            + (f"{file}, which has no {missing[0]}" if file else "a table: give labels=FILE.csv")
        )
    by_key = {
        key: [
            target_of(row[name], f"{file}, {given.what} {key}, {name}", binary=False)
            for name in predicted.classes
        ]
        for key, row in given.facts.items()
    }
    none = [np.nan] * len(predicted.classes)
    found = np.array([by_key.get(key, none) for key in given.keys], np.float64)
    other = found[np.isfinite(found) & (found != 0) & (found != 1)]
    if predicted.task == "multilabel" and len(other):
        raise ValueError(f"{file} has {other[0]:g} as a label, expected 1, 0 or an empty cell")
    return _both(predicted, found)


def _both(predicted: Predicted, targets: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Set targets of survival to NaN where time or event is unknown."""
    if predicted.task != "survival":
        return targets
    events = targets[np.isfinite(targets[:, 1]), 1]
    if not np.isin(events, (0, 1)).all():
        raise ValueError(
            f"{predicted.classes[1]} must be 1 (event at that time) or 0 (censored then)"
        )
    known = np.isfinite(targets).all(1, keepdims=True)
    return np.where(known, targets, np.nan)


def _no_label(predicted: Predicted, given: _Given) -> str:
    if given.file is None:
        return "the predictions have no labels: give a table of them, labels=FILE.csv"
    some = given.keys[0] if given.keys else "none"
    columns = LABEL if predicted.task == "classification" else ", ".join(predicted.classes)
    return (
        f"{given.file} has no label for any of {counted(len(set(given.keys)), given.what)} that "
        f"were predicted, such as {some!r}: it needs the columns {given.what} and {columns}"
    )


def _listed(text: str, what: str, names: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    shown = ", ".join(names[:_NAMED])
    return [f"{text.format(counted(len(names), what))}: {shown}{more}"]
