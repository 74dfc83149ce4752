"""Tables of predictions in the format of `spatialdl.predict`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.composing import composed

CLASSES = ("benign", "in situ", "tumour")


command = partial(composed, "evaluate")


def write_rows(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(head)
        table.writerows(rows)
    return path


def drawn(tiles: int = 120, slides: int = 12, seed: int = 0) -> tuple[list[str], Any, Any]:
    """Slides with tiles, tile probabilities with ties, and the classes of slides."""
    rng = np.random.default_rng(seed)
    of_slides = np.arange(slides) % 3
    number = rng.permutation(np.arange(tiles) % slides)
    truth = of_slides[number]
    values = rng.dirichlet((1, 1, 1), tiles) + 0.35 * np.eye(3)[truth]
    values = (values / values.sum(1, keepdims=True)).round(2)
    return [f"s{n}" for n in number], values, truth


def write_predictions(folder: Path, slides: Sequence[str], values: Any, labels: Any = None) -> Path:
    """predictions.csv of a classification; labels are numbers of classes, or None."""
    head = ["slide", "x", "y", "width", "height"]
    head += [] if labels is None else ["label"]
    head += ["predicted", *(f"probability_{name}" for name in CLASSES)]
    rows = []
    for n, (slide, row) in enumerate(zip(slides, values, strict=True)):
        label = [] if labels is None else [CLASSES[labels[n]] if labels[n] >= 0 else ""]
        told = CLASSES[int(np.argmax(row))]
        rows.append([slide, n, 2 * n, 32.0, 32.0, *label, told, *row.tolist()])
    write_rows(folder / "predictions.csv", head, rows)
    return folder


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))
