"""Tables of predictions per tile and per slide or volume: CSV, Parquet, console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spatialdl.data.predicted_table import need_pyarrow
from spatialdl.data.saving import replacing, save_table
from spatialdl.predicting.records import PredictionRecord
from spatialdl.text import aligned, fitted
from spatialdl.training.tasks.aggregation import to_slides

Columns = dict[str, Sequence[Any]]

PIXELS = "confusion"
"""Name of the table of pixels by true and predicted class (confusion counts)."""

_OF_SLIDES = ("slide", "tiles", "vote")
_LONGEST_NAME, _LONGEST_REMARK = 40, 100


def save_tables(
    folder: Path,
    records: Sequence[PredictionRecord],
    reports: Sequence[SlideReport],
    classes: Sequence[str],
    task: str,
    kind: str,
    *,
    volumes: bool = False,
) -> list[Path]:
    """Write predictions.KIND and slides.KIND, or volumes.KIND, each atomically.

    With masks, confusion.KIND is written as well.

    Args:
        records: records of the predicted slides.
        reports: reports of all slides, in order.
        kind: "csv" or "parquet".
        volumes: whether they are volumes, which have no tiles.
    """
    whole = slide_columns(records, reports, classes, task)
    tables = {"predictions": tile_columns(records, classes, task), "slides": whole}
    pixels = pixel_columns(records, classes)
    if volumes:
        rest = {head: cells for head, cells in whole.items() if head not in _OF_SLIDES}
        tables = {"volumes": {"volume": whole["slide"]} | rest}
    if pixels["slide"]:
        tables[PIXELS] = pixels
    else:  # left by an earlier command with other images
        (folder / f"{PIXELS}.{kind}").unlink(missing_ok=True)
    return [save_columns(folder, name, columns, kind) for name, columns in tables.items()]


def save_columns(folder: Path, name: str, columns: Columns, kind: str) -> Path:
    """Write NAME.KIND atomically.

    Args:
        kind: "csv" or "parquet".
    """
    path = folder / f"{name}.{kind}"
    if kind == "csv":
        rows = zip(*columns.values(), strict=True)
        save_table(path, columns, rows, errors="backslashreplace")
    else:
        arrow = need_pyarrow()
        with replacing(path) as out:
            data = {_text(name): list(map(_text, values)) for name, values in columns.items()}
            arrow.parquet.write_table(arrow.table(data), out)
    return path


def tile_columns(records: Sequence[PredictionRecord], classes: Sequence[str], task: str) -> Columns:
    """Columns of all tiles: position in level-0 pixels of their slide, and predictions."""
    spans = [record.span or (None, None) for record in records for _ in record.values]
    places = [place for record in records for place in record.places.tolist()]
    found: Columns = {
        "slide": [record.name for record in records for _ in record.values],
        "x": [x for x, _ in places],
        "y": [y for _, y in places],
        "width": [width for _, width in spans],
        "height": [height for height, _ in spans],
    }
    found |= _of_data_set(records)
    if any(record.labels for record in records):
        found["label"] = [label for record in records for label in _labels(record)]
    return found | predicted_columns(_stacked(records, len(classes)), classes, task)


def pixel_columns(records: Sequence[PredictionRecord], classes: Sequence[str]) -> Columns:
    """Columns of all images with masks: pixels of each true class by predicted class."""
    counted = [one for one in records if one.confusion is not None]
    rows = [
        (one.name, label, *row)
        for one in counted
        for label, row in zip(classes, np.asarray(one.confusion).tolist(), strict=True)
    ]
    heads = ("slide", "label", *(f"pixels_{name}" for name in classes))
    found = {head: [row[k] for row in rows] for k, head in enumerate(heads)}
    more = _of_data_set(counted)
    return found | {head: [cell for cell in cells for _ in classes] for head, cells in more.items()}


def slide_columns(
    records: Sequence[PredictionRecord],
    reports: Sequence[SlideReport],
    classes: Sequence[str],
    task: str,
) -> Columns:
    """Columns of all slides in order of reports: tiles, majority vote, means, status, reason.

    A failed slide has 0 tiles and empty cells.
    """
    found = _predicted_columns(records, classes, task)
    rows = dict(zip(found["slide"], zip(*found.values(), strict=True), strict=True))
    nothing = (None,) * (len(found) - 2)
    cells = [
        (*rows.get(one.name, (one.name, 0, *nothing)), one.status, one.problem or one.remark)
        for one in reports
    ]
    heads = [*found, "status", "reason"]
    return {head: [row[k] for row in cells] for k, head in enumerate(heads)}


def _predicted_columns(
    records: Sequence[PredictionRecord], classes: Sequence[str], task: str
) -> Columns:
    values = torch.from_numpy(_stacked(records, len(classes)))
    names = [record.name for record in records for _ in record.values]
    vote: Columns = {"vote": []} if task in ONE_CLASS else {}
    if not names:
        return {"slide": [], "tiles": []} | vote | predicted_columns(values.numpy(), classes, task)
    slides = to_slides(values, torch.zeros(len(names)), names)
    found: Columns = {"slide": slides.slides, "tiles": slides.tiles.tolist()}
    if all(len(record.values) == 1 for record in records):
        found |= _of_data_set(records)
    if any(record.labels for record in records):
        found["label"] = [_common(record) for record in records if len(record.values)]
    if vote:
        found["vote"] = [classes[number] for number in slides.votes.tolist()]
    return found | predicted_columns(slides.means.numpy(), classes, task)


def _of_data_set(records: Sequence[PredictionRecord]) -> Columns:
    """Columns of tiles of data sets: their sample index; of regions: their slide."""
    found: Columns = {}
    if any(one.region_of for one in records):
        found["region_of"] = [one.region_of for one in records for _ in one.values]
    if any(one.samples for one in records):
        found["sample"] = [n for one in records for n in one.samples]
    return found


def _labels(record: PredictionRecord) -> Sequence[str]:
    return record.labels or [""] * len(record.values)


def _common(record: PredictionRecord) -> str:
    """The label common to all tiles; empty if they differ."""
    found = set(_labels(record))
    return found.pop() if len(found) == 1 else ""


ONE_CLASS = ("classification", "segmentation")
"""Tasks with one class per sample or pixel."""


def predicted_columns(values: Any, classes: Sequence[str], task: str) -> Columns:
    """Columns of (N, columns) probabilities or values: most probable class, and all values."""
    found: Columns = {}
    if task in ONE_CLASS:
        found["predicted"] = [classes[number] for number in values.argmax(1).tolist()]
    what = "predicted" if task == "regression" else "probability"
    return found | {f"{what}_{name}": values[:, k].tolist() for k, name in enumerate(classes)}


def _stacked(records: Sequence[PredictionRecord], columns: int) -> Any:
    return np.concatenate([np.empty((0, columns)), *(record.values for record in records)])


def _text(value: Any) -> Any:
    """Escape surrogates as in the CSV: names may not be valid Unicode."""
    if not isinstance(value, str):
        return value
    return value.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class SlideReport:
    """The result of a slide: `problem` is why it has none, `failed` fails the command."""

    name: str
    tiles: int = 0
    predicted: str = ""
    value: float | None = None
    remark: str = ""
    problem: str = ""
    failed: bool = False

    @property
    def status(self) -> str:
        """ "processed", "damaged" if some tiles were unreadable, or "failed"."""
        return "failed" if self.problem else "damaged" if self.failed else "processed"


def table(reports: Sequence[SlideReport], *, volumes: bool = False) -> str:
    """Console table, a row per slide: tiles, class of the largest mean probability, that mean.

    Args:
        volumes: whether they are volumes, which have no tiles.
    """
    rows = [("slide", "tiles", "predicted", "mean", "")]
    if volumes:
        rows = [("volume", "", "predicted", "mean", "")]
    for one in reports:
        value = "" if one.value is None else f"{one.value:.3f}"
        remark = f"failed: {one.problem}" if one.problem else one.remark
        tiles = "" if one.problem or volumes else f"{one.tiles:,}"
        name = fitted(one.name, _LONGEST_NAME)
        rows.append((name, tiles, one.predicted, value, fitted(remark, _LONGEST_REMARK)))
    return "\n".join(aligned(rows, left=(0, 2, 4)))
