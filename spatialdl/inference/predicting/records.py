"""Records of predicted slides, from which a restarted run resumes, and tables of them.

Tables are CSV or Parquet, per tile and per slide or volume; one is printed.
"""

from __future__ import annotations

import json
import logging
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
from spatialdl.common.text import aligned, counted, fitted
from spatialdl.data.outcomes import result_key
from spatialdl.inference.predicting.trained import Trained
from spatialdl.slides.reading.paths import slide_files
from spatialdl.training.tasks.predictions import to_slides
from spatialdl.training.tasks.survival import survival_columns

log = logging.getLogger("spatialdl.predict")

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
            entries = {"bag": 0, "remark": "", **entries}  # which older records lack
            sides = None if entries["span"] is None else _span(entries["span"])
            record = cls(
                name,
                fields.text(entries, "key"),
                places,
                sides,
                values,
                fields.whole(entries, "left_out"),
                fields.texts(entries, "files"),
                fields.texts(entries, "labels"),
                confusion,
                fields.text(entries, "region_of"),
                samples.tolist(),
                fields.whole(entries, "bag"),
                fields.text(entries, "remark"),
            )
            count, columns = values.shape
            counts = confusion if confusion is not None else np.empty((columns, columns), _PLACE)
            is_whole = (
                record.key == key
                and all((run_dir / file).is_file() for file in record.files)
                and [places.dtype, values.dtype, samples.dtype] == [_PLACE, _VALUE, _PLACE]
                and places.shape == (count, 2)
                and len(record.labels) in (0, count)
                and samples.shape in ((0,), (count,))
                and (counts.dtype, counts.shape) == (_PLACE, (columns, columns))
            )
        except _UNREADABLE:
            return None
        return record if is_whole else None


def key_of(settings: Any, path: Path | None) -> str:
    """A digest of settings and of a slide's files by path, length and modification time.

    Of a missing file, which is reported where it is opened, it is the error.
    """
    state = None
    try:
        files = [] if path is None else [(file, file.stat()) for file in slide_files(path)]
        state = [v for file, at in files for v in (str(file.resolve()), at.st_size, at.st_mtime_ns)]
    except OSError as error:
        return f"{path}: {error.strerror}"
    return result_key([_VERSION, settings, state], sort_keys=False)


def _span(value: Any) -> tuple[float, float]:
    rows, cols = ({"span": side} for side in value)
    return fields.positive(rows, "span"), fields.positive(cols, "span")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{storable(name)}.npz"


# --- tables


def save_tables(
    folder: Path,
    results: Sequence[SlideResult],
    classes: Sequence[str],
    task: str,
    table_kind: str,
    kind: str = "slides",
) -> list[Path]:
    """Write predictions.CSV and slides.CSV, or only volumes.CSV or slides.CSV, each atomically.

    With masks, confusion.CSV is written as well.

    Args:
        results: results of all slides, in order.
        table_kind: "csv" or "parquet".
        kind: "slides"; "volumes" or "bags", which are predicted as a whole.
    """
    records = [one.record for one in results if one.record is not None]
    slides = slide_columns(results, classes, task)
    tables = {"predictions": tile_columns(records, classes, task), "slides": slides}
    if kind == "bags":
        tables = {"slides": {head: cells for head, cells in slides.items() if head != "vote"}}
    elif kind == "volumes":
        rest = {head: cells for head, cells in slides.items() if head not in _OF_SLIDES}
        tables = {"volumes": {"volume": slides["slide"]} | rest}
    pixels = pixel_columns(records, classes)
    if pixels["slide"]:
        tables[PIXELS] = pixels
    else:  # left by an earlier command with other images
        (folder / f"{PIXELS}.{table_kind}").unlink(missing_ok=True)
    return [_save_columns(folder, name, columns, table_kind) for name, columns in tables.items()]


def _save_columns(folder: Path, name: str, columns: Columns, kind: str) -> Path:
    """Write NAME.CSV atomically.

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
    masked = [one for one in records if one.confusion is not None]
    rows = [
        (one.name, label, *row)
        for one in masked
        for label, row in zip(classes, np.asarray(one.confusion).tolist(), strict=True)
    ]
    heads = ("slide", "label", *(f"pixels_{name}" for name in classes))
    found = {head: [row[k] for row in rows] for k, head in enumerate(heads)}
    more = _of_data_set(masked)
    return found | {head: [cell for cell in cells for _ in classes] for head, cells in more.items()}


def slide_columns(results: Sequence[SlideResult], classes: Sequence[str], task: str) -> Columns:
    """Columns of all slides: tiles, majority vote, means, status, reason.

    A failed slide has empty cells.
    """
    records = [one.record for one in results if one.record is not None]
    found = _predicted_columns(records, classes, task)
    rows = dict(zip(found["slide"], zip(*found.values(), strict=True), strict=True))
    nothing = (None,) * (len(found) - 2)
    reports = [one.report for one in results]
    cells = [
        (*rows.get(one.name, (one.name, one.tiles, *nothing)), one.status, one.reason)
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
    bags = {record.name: record.bag for record in records if record.bag}
    counts = dict(zip(slides.slides, slides.tiles.tolist(), strict=True)) | bags
    found: Columns = {"slide": slides.slides, "tiles": [*counts.values()]}
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
    if task == "survival":
        heads = survival_columns(values.shape[1] - 1)
        return dict(zip(heads, values.T.tolist(), strict=True))
    found: Columns = {}
    if task in ONE_CLASS:
        found["predicted"] = [classes[number] for number in values.argmax(1).tolist()]
    what = "predicted" if task == "regression" else "probability"
    return found | {f"{what}_{name}": values[:, k].tolist() for k, name in enumerate(classes)}


def _stacked(records: Sequence[PredictionRecord], columns: int) -> Any:
    values = [record.values for record in records]
    return np.concatenate(values) if values else np.empty((0, columns))


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

    @property
    def reason(self) -> str:
        """Why it has no result, or a remark on the result."""
        return self.problem or self.remark


@dataclass(frozen=True)
class SlideResult:
    """The report of a slide, and its record if it was predicted."""

    report: SlideReport
    record: PredictionRecord | None = None


def result_of(record: PredictionRecord, trained: Trained, remark: str = "") -> SlideResult:
    """The result of a predicted slide.

    Args:
        remark: why the prediction may be wrong, if no tile was left out.
    """
    means = record.values.mean(0)
    best = int(means.argmax())
    name = trained.classes[best] if best < len(trained.classes) else str(best)
    if trained.task == "survival":
        best, name = 0, "risk"
    if record.left_out:
        remark = f"{counted(record.left_out, 'tile')} could not be read"
    tiles = record.bag or len(record.values)
    failed = record.left_out > 0
    value = float(means[best])
    remark = record.remark or remark
    report = SlideReport(record.name, tiles, name, value, remark, failed=failed)
    return SlideResult(report, record)


def known_result(run_dir: Path, name: str, key: str, trained: Trained) -> SlideResult | None:
    """The result of an earlier run for a slide, if its inputs are the same."""
    record = PredictionRecord.load(run_dir, name, key)
    if record is None:
        return None
    log.info("%s is already predicted; overwrite=true predicts it again", name)
    return result_of(record, trained)


def table(reports: Sequence[SlideReport], kind: str = "slides") -> str:
    """Console table, a row per slide: tiles, class of the largest mean probability, that mean.

    Args:
        kind: as in `save_tables`; volumes have no tiles.
    """
    volumes = kind == "volumes"
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
