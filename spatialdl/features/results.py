"""What a run leaves of a slide: its feature file, with the key by which it is known again. ::

h5/NAME.h5       features, coords
maps/NAME.h5     features of a whole region, see `features.maps`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from spatialdl.data.feature_file import FEATURES, UNREADABLE, write_features
from spatialdl.data.own_dataset import own_dataset
from spatialdl.errors import SlideError
from spatialdl.features.encoding import Filling
from spatialdl.slides.batch.report import Report
from spatialdl.slides.batch.steps import sum_up

FOLDER, MAPS = "h5", "maps"
_KEY, _REPORT = "key", "report"


@dataclass(frozen=True)
class Before:
    """A slide that has features already: the key of what they were made from, and its report."""

    key: str
    report: Report


def file_of(out: Path, name: str, folder: str = FOLDER) -> Path:
    """The feature file of a slide."""
    return out / folder / f"{name}.h5"


def load_before(out: Path, name: str, folder: str = FOLDER) -> Before | None:
    """What an earlier run has made of a slide; None if nothing, or if it is damaged."""
    try:
        with h5py.File(file_of(out, name, folder), "r", locking=False) as h5:
            attributes = own_dataset(h5, FEATURES).attrs
            report = Report.from_json(json.loads(str(attributes[_REPORT])))
            return Before(str(attributes[_KEY]), report)
    except (*UNREADABLE, AttributeError, RecursionError):
        return None


def check_other(before: Before | None, key: str, out: Path, file: str) -> None:
    """Refuse to write over the features of another slide of that name.

    Raises:
        SlideError: the ones that are there are of a slide from elsewhere.
    """
    if before is None or before.key == key or before.report.file == file:
        return
    raise SlideError(
        f"{out} has features of another slide named {before.report.slide}, from "
        f"{before.report.file}; rename {file}, or write to another folder"
    )


def known_again(key: str, report: Report) -> dict[str, str]:
    """The attributes of features that `load_before` reads."""
    return {_KEY: key, _REPORT: json.dumps({**report.to_json(), "seconds": 0.0})}


def save_slide(
    out: Path, filling: Filling, dtype: np.dtype[Any], about: Mapping[str, object]
) -> Report:
    """Write the features of a slide, if there are any, and say what became of it.

    Args:
        out: the folder of the run.
        filling: all of its features.
        dtype: in which they are stored.
        about: attributes of the features, such as the encoder's name.

    Raises:
        SlideError: features are not finite.
        OSError: they cannot be written.
    """
    bag, report = filling.bag, filling.bag.report
    sum_up(report, filling.parts)
    path = file_of(out, bag.name)
    if not report.written:
        path.unlink(missing_ok=True)  # of what the slide was before
        return report
    features = np.concatenate(filling.features)
    with np.errstate(over="ignore"):  # found below
        stored = features.astype(dtype)
    bad = int((~np.isfinite(stored)).any(1).sum())
    if bad:
        large = np.isfinite(features).all()
        remedy = "take --dtype float32" if large else "take --precision float32 or bf16"
        raise SlideError(
            f"slide {bag.report.file}: {bad} of {len(stored)} tiles have features that are not "
            f"finite{f' in {dtype}' if large else ''}; {remedy}"
        )
    coords = np.array([(x, y) for part in filling.parts for x, y, _ in part.taken], np.int64)
    said = {**about, **known_again(bag.key, report)}
    write_features(path, stored, coords.reshape(-1, 2), bag.attributes, said)
    return report
