"""Predictions from the tables of `spatialdl.predict` or a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.tables import SAMPLE, find_predicted, read_predicted
from spatialdl.inference.predicting.records import PIXELS

RISK = "risk"
"""Column of predictions of task=survival."""

SURVIVAL = ("time", "event")

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Predicted:
    """Predictions for N tiles or images.

    Attributes:
        task: task of the network.
        classes: names of the classes or targets.
        slides: N names of slides; several tiles, or images that are regions, share one.
        names: N names; a tile has that of its slide.
        samples: N sample indices in the data set, as text; empty if the table has none.
        places: (N, 4), level-0 x, y, width and height, NaN where unknown.
        values: (N, classes).
        labels: N class names, empty where unknown; an empty list if the table has no labels.
        targets: (N, classes), if the table has targets.
        pixels: int64 (images, classes, classes) by true and predicted class, for segmentation.
        whole: kind of `slides`: "slide", "volume", or "image" for samples without slide.
        failed: reason by slide or image, if it has no or incomplete predictions.
    """

    task: str
    classes: Sequence[str]
    slides: Sequence[str]
    names: Sequence[str]
    places: Floats
    values: Floats
    labels: Sequence[str] = ()
    targets: Floats | None = None
    pixels: npt.NDArray[np.int64] | None = None
    samples: Sequence[str] = ()
    whole: str = "slide"
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def part(self) -> str:
        """Kind of the N predictions, "image" or "tile"."""
        apart = self.task == "segmentation" or list(self.names) != list(self.slides)
        return "image" if apart else "tile"


def read_predictions(folder: Path) -> Predicted:
    """Read the predictions of a directory.

    Raises:
        ValueError: there are no predictions, or their table is malformed.
    """
    masks = find_predicted(folder, PIXELS)
    if masks is not None:
        return _of_pixels(masks, _failed(folder))
    # predictions of bags have only a table of slides
    for name, key in (("predictions", "slide"), ("volumes", "volume"), ("slides", "slide")):
        path = find_predicted(folder, name)
        if path is not None:
            return _of_samples(path, read_predicted(path), key, _failed(folder))
    raise ValueError(f"{folder} has no predictions.csv or predictions.parquet")


def _of_samples(path: Path, columns: Columns, key: str, failed: Mapping[str, str]) -> Predicted:
    heads = list(columns)
    kinds = {"probability_": "multilabel", "predicted_": "regression"}
    what = next((w for w in kinds if any(head.startswith(w) for head in heads)), None)
    if what is None and RISK in columns:
        return _of_risks(path, columns, key, failed)
    if what is None:
        raise ValueError(f"{path} has no columns probability_CLASS, predicted_TARGET or risk")
    if key not in columns:
        raise ValueError(f"{path} has no column {key}; it has {', '.join(heads)}")
    classes = [head.removeprefix(what) for head in heads if head.startswith(what)]
    kind = "classification" if "predicted" in columns else kinds[what]
    values = np.stack([_numbers(path, columns, f"{what}{name}") for name in classes], 1)
    names = _names(columns, key)
    kept = [n for n, name in enumerate(names) if name not in failed or _is_predicted(values[n])]
    places = [
        _numbers(path, columns, name) if name in columns else np.full(len(values), np.nan)
        for name in ("x", "y", "width", "height")
    ]
    targets = None
    if kind != "classification" and all(f"label_{name}" in columns for name in classes):
        targets = np.stack([_numbers(path, columns, f"label_{name}") for name in classes], 1)[kept]
    labels = columns.get("label", ()) if kind == "classification" else ()
    owners = _owners(columns, names)
    return Predicted(
        kind,
        classes,
        [owners[n] for n in kept],
        [names[n] for n in kept],
        np.stack(places, 1)[kept],
        values[kept],
        [labels[n] for n in kept] if labels else (),
        targets,
        samples=[cells[n] for n in kept] if (cells := columns.get(SAMPLE, ())) else (),
        whole=key if any(columns[key]) else "image",
        failed=failed,
    )


def _names(columns: Columns, key: str) -> list[str]:
    """Names of predictions: their slide's, or that of the sample if it has no slide."""
    numbers = columns.get(SAMPLE, [""] * len(columns[key]))
    pairs = zip(columns[key], numbers, strict=True)
    return [name or (f"sample {number}" if number else "") for name, number in pairs]


def _owners(columns: Columns, names: Sequence[str]) -> list[str]:
    """Slides of images: the slide of which they are a region, or else their own name."""
    of = columns.get("region_of", [""] * len(names))
    return [owner or name for owner, name in zip(of, names, strict=True)]


def _of_risks(path: Path, columns: Columns, key: str, failed: Mapping[str, str]) -> Predicted:
    """Predictions of task=survival; training runs write time and event before the risk."""
    heads = list(columns)
    at = heads.index(RISK)
    is_labelled = "status" not in columns and at > 2  # else slide and tiles precede the risk
    names = heads[at - 2 : at] if is_labelled else SURVIVAL
    risks = _numbers(path, columns, RISK)
    kept = [n for n, name in enumerate(columns[key]) if name not in failed]
    targets = None
    if is_labelled:
        targets = np.stack([_numbers(path, columns, name) for name in names], 1)[kept]
    slides = [columns[key][n] for n in kept]
    return Predicted(
        "survival",
        list(names),
        slides,
        slides,
        np.full((len(kept), 4), np.nan),
        risks[kept, None],
        targets=targets,
        whole=key,
        failed=failed,
    )


def _is_predicted(row: Floats) -> bool:
    return not np.isnan(row).all()


def _of_pixels(path: Path, failed: Mapping[str, str]) -> Predicted:
    columns = read_predicted(path)
    classes = [head.removeprefix("pixels_") for head in columns if head.startswith("pixels_")]
    first = slice(None, None, max(1, len(classes)))  # first row of each image
    names = columns.get("slide", [])[first]
    rows = [(name, label) for name in names for label in classes]
    if not classes or rows != list(zip(columns["slide"], columns.get("label", ()), strict=False)):
        raise ValueError(f"{path} lacks rows: expected one per image and class; predict again")
    counts = np.stack([_numbers(path, columns, f"pixels_{name}") for name in classes], 1)
    pixels = counts.reshape(len(names), len(classes), len(classes)).astype(np.int64)
    places = np.full((len(names), 4), np.nan)
    values = np.empty((len(names), len(classes)))
    owners = _owners({head: cells[first] for head, cells in columns.items()}, names)
    return Predicted(
        *("segmentation", classes, owners, names, places, values),
        pixels=pixels,
        samples=columns.get(SAMPLE, [])[first],
        failed=failed,
    )


def _failed(folder: Path) -> dict[str, str]:
    for name, key in (("slides", "slide"), ("volumes", "volume")):
        path = find_predicted(folder, name)
        columns = {} if path is None else read_predicted(path)
        if "status" in columns and key in columns:
            rows = zip(columns[key], columns["status"], columns.get("reason", ()), strict=False)
            return {slide: why for slide, status, why in rows if status not in ("processed", "")}
    return {}


def _numbers(path: Path, columns: Columns, name: str) -> Floats:
    """A column as floats; empty cells are NaN."""
    try:
        return np.array([float(cell) if cell else np.nan for cell in columns[name]], np.float64)
    except ValueError as error:
        raise ValueError(
            f"{path}: column {name} has a cell that is not a number: {error}"
        ) from error
