"""Records of predicted slides, from which a restarted run resumes, and tables of them.

Tables are CSV or Parquet, per tile and per slide or volume; one is printed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from spatialdl.common import fields
from spatialdl.common.files import replacing, save_table, storable
from spatialdl.common.packages import needed
from spatialdl.common.text import aligned, fitted
from spatialdl.data.outcomes import result_key
from spatialdl.slides.reading.paths import slide_files
from spatialdl.training.tasks.predictions import to_slides

Columns = dict[str, Sequence[Any]]

PIXELS = "confusion"
"""Name of the table of pixels by true and predicted class (confusion counts)."""

_OF_SLIDES = ("slide", "tiles", "vote")
_LONGEST_NAME, _LONGEST_REMARK = 40, 100

FOLDER = "records"
"""Folder of records in a run directory."""

_VERSION = 3  # of the record format; records of another version are replaced
_PLACE, _VALUE = np.dtype(np.int64), np.dtype(np.float64)
# raised by NumPy and zipfile for damaged files, and for forged sizes or encryption
_UNREADABLE = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError),
    *(BadZipFile, LZMAError, zlib.error),
)


@dataclass(frozen=True)
class PredictionRecord:
    """The predictions for a slide.

    Attributes:
        key: digest of the inputs, see `key_of`.
        places: int64 (N, 2), level-0 x and y of its tiles.
        span: level-0 rows and columns of a tile, if known.
        values: float64 (N, classes).
        left_out: number of unreadable tiles.
        files: files of its maps, in the run directory.
        labels: true class names of the tiles, empty where unknown; an empty list if all are.
        confusion: int64 (classes, classes), pixels by true and predicted class, if there is a mask.
        region_of: the slide of which it is a region.
        samples: indices of its tiles in their data set, if they are from one.
        bag: number of tiles, if the slide was predicted as one bag of them.
        remark: why files are missing.
    """

    name: str
    key: str
    places: npt.NDArray[np.int64]
    span: tuple[float, float] | None
    values: npt.NDArray[np.float64]
    left_out: int = 0
    files: Sequence[str] = ()
    labels: Sequence[str] = ()
    confusion: npt.NDArray[np.int64] | None = None
    region_of: str = ""
    samples: Sequence[int] = ()
    bag: int = 0
    remark: str = ""

    def save(self, run_dir: Path) -> None:
        """Write the record, after all of its files."""
        (run_dir / FOLDER).mkdir(exist_ok=True)
        names = ("name", "key", "span", "left_out", "region_of", "bag", "remark")
        entries = {name: getattr(self, name) for name in names}
        entries |= {"files": list(self.files), "labels": list(self.labels)}
        arrays: dict[str, Any] = {"places": self.places, "values": self.values}
        arrays["samples"] = np.asarray(self.samples, np.int64)
        if self.confusion is not None:
            arrays["confusion"] = self.confusion
        with replacing(_path(run_dir, self.name)) as out:
            np.savez(out, told=json.dumps(entries), **arrays)

    @classmethod
    def load(cls, run_dir: Path, name: str, key: str) -> PredictionRecord | None:
        """The record of a slide, if its inputs are the same and all files exist."""
        try:
            with np.load(_path(run_dir, name)) as found:
                entries = fields.table({"told": fields.parse(str(found["told"]))}, "told")
                places, values = found["places"], found["values"]
                samples, confusion = found["samples"], found.get("confusion")
            files, left_out = fields.texts(entries, "files"), fields.whole(entries, "left_out")
            labels, region_of = fields.texts(entries, "labels"), fields.text(entries, "region_of")
            defaults = {"bag": 0, "remark": "", **entries}  # which older records lack
            bag, remark = fields.whole(defaults, "bag"), fields.text(defaults, "remark")
            span = None if entries["span"] is None else _span(entries["span"])
            same = fields.text(entries, "key") == key
            whole = all((run_dir / file).is_file() for file in files)
        except _UNREADABLE:
            return None
        alike = places.shape == (len(values), 2) and values.ndim == 2
        typed = (places.dtype, values.dtype, samples.dtype) == (_PLACE, _VALUE, _PLACE)
        if not (same and whole and alike and typed) or len(labels) not in (0, len(values)):
            return None
        if samples.shape not in ((0,), (len(values),)):
            return None
        if confusion is not None and (confusion.dtype, confusion.shape) != (
            _PLACE,
            (values.shape[1],) * 2,
        ):
            return None
        return cls(
            *(name, key, places, span, values, left_out, files, labels, confusion),
            *(region_of, samples.tolist(), bag, remark),
        )


def key_of(settings: Any, path: Path | None) -> str:
    """A digest of settings and of a slide's files by path, length and modification time."""
    state = None
    if path is not None:
        files = [(file, file.stat()) for file in slide_files(path)]
        state = [v for file, at in files for v in (str(file.resolve()), at.st_size, at.st_mtime_ns)]
    return result_key([_VERSION, settings, state], sort_keys=False)


def _span(value: Any) -> tuple[float, float]:
    rows, cols = ({"span": side} for side in value)
    return fields.positive(rows, "span"), fields.positive(cols, "span")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{storable(name)}.npz"


# --- tables


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
        parquet = needed("pyarrow.parquet", "parquet", "table=parquet")
        with replacing(path) as out:
            data = {_text(name): list(map(_text, values)) for name, values in columns.items()}
            parquet.write_table(needed("pyarrow", "parquet").table(data), out)
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
