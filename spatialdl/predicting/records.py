"""Records of predicted slides, from which a restarted run resumes."""

from __future__ import annotations

import hashlib
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

from spatialdl.data import fields
from spatialdl.data.saving import replacing
from spatialdl.slides.batch.finding_slides import storable
from spatialdl.slides.reading.paths import slide_files

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
    text = json.dumps([_VERSION, settings, state], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _span(value: Any) -> tuple[float, float]:
    rows, cols = ({"span": side} for side in value)
    return fields.positive(rows, "span"), fields.positive(cols, "span")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{storable(name)}.npz"
