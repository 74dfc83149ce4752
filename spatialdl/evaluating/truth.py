"""What is known of slides: their labels, patients and groups, from a CSV and from data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt

from spatialdl.data.slide_table import PATIENT, SlideTable, read_table
from spatialdl.data.targets import UNKNOWN_TARGETS
from spatialdl.evaluating.predicted import Predicted
from spatialdl.slides.batch.finding_slides import storable
from spatialdl.text import counted

LABEL = "label"
_NAMED = 5  # slides that a remark names


@dataclass(frozen=True)
class Truth:
    """What is to be predicted of each of N tiles.

    Attributes:
        labels: int64 (N,), classes, -1 where unknown; or (N, targets), NaN where unknown.
        facts: by slide what the CSV says of it.
        patients: by slide; empty if nobody says.
        remarks: what is missing.
    """

    labels: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    facts: Mapping[str, Mapping[str, str]]
    patients: Mapping[str, str]
    remarks: Sequence[str]


def find_truth(predicted: Predicted, file: Path | None) -> Truth:
    """Match predictions with labels.

    Args:
        file: of labels, which replace those of the predictions where it has any.

    Raises:
        ValueError: the file does not fit the predictions, or nobody knows any label.
    """
    slides = list(dict.fromkeys(predicted.slides))
    facts: dict[str, Mapping[str, str]] = {}
    remarks: list[str] = []
    columns: Sequence[str] = ()
    if file is not None:
        table = read_table(file)
        columns = table.columns
        known = [*slides, *(name for name in predicted.failed if name not in slides)]
        facts, unknown = match_slides(table, known, file)
        remarks += _listed("{} of the labels without predictions", unknown)
        missing = [name for name in slides if name not in facts]
        remarks += _listed(f"{{}} without a line in {file.name}", missing)
    patients = {}
    if PATIENT in columns:  # a slide of nobody is a patient of its own
        given = {name: facts.get(name, {}).get(PATIENT, "") for name in slides}
        patients = {name: patient or f"slide {name}" for name, patient in given.items()}
    if predicted.task == "segmentation":
        return Truth(np.zeros(len(predicted.slides), np.int64), facts, patients, remarks)
    if predicted.task == "classification":
        labels = _classes(predicted, facts, columns, file)
        unknown_labels = labels < 0
    else:
        targets = _targets(predicted, facts, columns, file)
        labels, unknown_labels = targets, np.isnan(targets).all(1)  # type: ignore[assignment]
    if unknown_labels.all():
        raise ValueError(_no_label(predicted, file))
    bare = {name for name, none in zip(predicted.slides, unknown_labels, strict=True) if none}
    remarks += _listed("{} without a label, left out", [name for name in slides if name in bare])
    return Truth(labels, facts, patients, remarks)


def match_slides(
    table: SlideTable, slides: Sequence[str], file: Path
) -> tuple[dict[str, Mapping[str, str]], list[str]]:
    """The rows of slides by their names in the predictions, and the names of other rows.

    A table may name a slide with its suffix and its folders.

    Raises:
        ValueError: two rows may be of the same slide.
    """
    found: dict[str, Mapping[str, str]] = {}
    unknown, there = [], set(slides)
    for row in table.rows:
        given = row[table.key]
        name = next((one for one in _spellings(given) if one in there), None)
        if name is None:
            unknown.append(given)
        elif name in found:
            raise ValueError(
                f"{file}: {found[name][table.key]!r} and {given!r} may both be slide {name!r} of "
                "the predictions; keep one, or write the name as the predictions have it"
            )
        else:
            found[name] = row
    return found, unknown


def _spellings(given: str) -> list[str]:
    path = PurePath(given)
    stem = path.stem if path.stem.strip(".") else path.name
    tails = ["_".join(path.parts[-depth:]).lstrip("/") for depth in range(2, len(path.parts) + 1)]
    return [storable(name) for name in (given, path.name, stem, *tails) if name]


def _classes(
    predicted: Predicted,
    facts: Mapping[str, Mapping[str, str]],
    columns: Sequence[str],
    file: Path | None,
) -> npt.NDArray[np.int64]:
    names: Sequence[str] = predicted.labels or [""] * len(predicted.slides)
    if LABEL in columns:
        names = [facts.get(slide, {}).get(LABEL, "") for slide in predicted.slides]
    numbers = {name: number for number, name in enumerate(predicted.classes)} | {"": -1}
    other = sorted({name for name in names if name not in numbers})
    if other:
        where = f"{file} has" if LABEL in columns else "the data set has"
        raise ValueError(
            f"{where} the label {other[0]!r}, but the network knows "
            f"{', '.join(predicted.classes)}: name the classes alike, or leave the cell empty"
        )
    return np.array([numbers[name] for name in names], np.int64)


def _targets(
    predicted: Predicted,
    facts: Mapping[str, Mapping[str, str]],
    columns: Sequence[str],
    file: Path | None,
) -> npt.NDArray[np.float64]:
    missing = [name for name in predicted.classes if name not in columns]
    if missing and predicted.targets is not None:
        return _both(predicted, predicted.targets)
    if missing:
        raise ValueError(
            f"task={predicted.task} is compared with columns {', '.join(predicted.classes)} of "
            + (f"{file}, which has no {missing[0]}" if file else "a table: give labels=FILE.csv")
        )
    by_slide = {
        slide: [_number(row[name], f"{file}, slide {slide}, {name}") for name in predicted.classes]
        for slide, row in facts.items()
    }
    none = [np.nan] * len(predicted.classes)
    found = np.array([by_slide.get(slide, none) for slide in predicted.slides], np.float64)
    other = found[np.isfinite(found) & (found != 0) & (found != 1)]
    if predicted.task == "multilabel" and len(other):
        raise ValueError(f"{file} has {other[0]:g} as a label, expected 1, 0 or an empty cell")
    return _both(predicted, found)


def _both(predicted: Predicted, targets: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of survival, nothing where time or event is unknown."""
    if predicted.task != "survival":
        return targets
    events = targets[np.isfinite(targets[:, 1]), 1]
    if not np.isin(events, (0, 1)).all():
        raise ValueError(
            f"{predicted.classes[1]} must be 1 (it happened then) or 0 (not seen until then)"
        )
    known = np.isfinite(targets).all(1, keepdims=True)
    return np.where(known, targets, np.nan)


def _number(cell: str, where: str) -> float:
    if cell.lower() in UNKNOWN_TARGETS:
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{where}: {cell!r} is no number; leave unknown targets empty") from None
    if not np.isfinite(value):
        raise ValueError(f"{where}: {cell} is not finite; leave unknown targets empty")
    return value


def _no_label(predicted: Predicted, file: Path | None) -> str:
    if file is None:
        return "the predictions have no labels: give a table of them, labels=FILE.csv"
    some = predicted.slides[0] if predicted.slides else "none"
    return (
        f"{file} has a label for none of {counted(len(set(predicted.slides)), 'slide')} that were "
        f"predicted, such as {some!r}: it needs the columns slide and label"
    )


def _listed(text: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    shown = ", ".join(names[:_NAMED])
    return [f"{text.format(counted(len(names), 'slide'))}: {shown}{more}"]
