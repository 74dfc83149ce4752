"""Predictions for all samples of a validation, and the tables they are written to.

predictions.csv   a row a sample: where it lies, its label, what was predicted
slides.csv        a row a slide: the same of all its tiles together
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spatialdl.data.bags import BagSource
from spatialdl.data.image_source import ImageSource
from spatialdl.data.saving import save_table
from spatialdl.training.tasks.aggregation import SlidePredictions, to_slides
from spatialdl.training.tasks.metrics import Scores
from spatialdl.training.tasks.survival import survival_columns
from spatialdl.training.tasks.task import SampleTask

SHOWN = 4
"""So many of the worst, and of the best."""
_DIGITS = 12  # so that what only rounding tells apart has the same order in every layout


@dataclass(frozen=True)
class Predictions:
    """What a network says of every sample of a data set.

    Attributes:
        outputs: float64 (N, columns), what it gave, in the order of the samples.
        source: the samples.
        names: of the columns.
        numbers: of the samples, where their own differ.
    """

    task: SampleTask
    outputs: Tensor
    source: ImageSource
    names: Sequence[str]
    numbers: Sequence[int] | None = None

    @cached_property
    def values(self) -> Tensor:
        """float64 (N, columns): probabilities, or values."""
        return self.task.predictions(self.outputs)

    @cached_property
    def labels(self) -> Tensor:
        """(N,) or (N, columns)."""
        return torch.from_numpy(self.source.labels)

    @cached_property
    def slides(self) -> SlidePredictions | None:
        """Of all slides, if the samples name any, and are not whole slides themselves."""
        if not self._where or isinstance(self.source, BagSource):
            return None
        names = [one.slide for one in self._where]
        return to_slides(self.values, self.labels, names) if all(names) else None

    @cached_property
    def _where(self) -> list[Any]:
        """What the data set says of every sample; nothing of synthetic ones."""
        sample = getattr(self.source, "sample", None)
        return [] if sample is None else [sample(number) for number in range(len(self.source))]

    def scores(self, own: Callable[[Tensor, Tensor], Scores] | None = None) -> Scores:
        """The loss and all metrics, of the samples, and of slides whose tiles have one label.

        Args:
            own: further metrics, of predictions and labels.
        """
        found: Scores = {
            "loss": float(self.task.loss(self.outputs, self.labels)),
            "samples": len(self.labels),
            **self._metrics(self.values, self.labels, own),
        }
        slides = self.slides
        if slides is None:
            return found
        agree = slides.agree
        found["slides"] = int(agree.sum())
        of_slides = self._metrics(slides.means[agree], slides.labels[agree], own)
        for name, value in of_slides.items():
            if not isinstance(value, list):
                found[f"slide_{name}"] = value
        if self.task.name == "classification":
            right = (slides.votes == slides.labels)[agree]
            found["slide_vote_accuracy"] = float(right.double().mean()) if len(right) else None
        return found

    def _metrics(
        self, values: Tensor, labels: Tensor, own: Callable[[Tensor, Tensor], Scores] | None
    ) -> Scores:
        found = self.task.scores(values, labels)
        return found if own is None else {**found, **own(values, labels)}

    def write(self, folder: Path) -> None:
        """Both tables, each whole or not at all; slides only if the samples name any."""
        save_table(folder / "predictions.csv", self._sample_head(), self._sample_rows())
        if self.slides is not None:
            save_table(folder / "slides.csv", self._slide_head(), self._slide_rows(self.slides))

    def _columns(self, before: str) -> list[str]:
        more = range(len(self.names), self.values.shape[1])  # a network may tell more apart
        return [f"{before}{name}" for name in [*self.names, *map(str, more)]]

    def _labelled(self) -> list[str]:
        """The columns of labels and predictions."""
        if self.task.name == "classification":
            return ["label", "predicted", *self._columns("probability_")]
        if self.task.name == "survival":
            return [*self.names, *survival_columns(self.values.shape[1] - 1)]
        what = "probability_" if self.task.name == "multilabel" else "predicted_"
        return [*self._columns("label_"), *self._columns(what)]

    def _sample_head(self) -> list[str]:
        return ["sample", "slide", "x", "y", "split", *self._labelled()]

    def _slide_head(self) -> list[str]:
        votes = ["vote"] if self.task.name == "classification" else []
        return ["slide", "tiles", *votes, *self._labelled()]

    def _sample_rows(self) -> Iterable[list[object]]:
        numbers = range(len(self.labels)) if self.numbers is None else self.numbers
        told = self._told(self.labels, self.values)
        for place, (number, cells) in enumerate(zip(numbers, told, strict=True)):
            one = self._where[place] if self._where else None
            where = [one.slide, one.x, one.y, one.split] if one is not None else [None] * 4
            yield [number, *where, *cells]

    def _slide_rows(self, slides: SlidePredictions) -> Iterable[list[object]]:
        told = self._told(slides.labels, slides.means)
        is_class = self.task.name == "classification"
        for place, (slide, cells) in enumerate(zip(slides.slides, told, strict=True)):
            if not slides.agree[place]:
                width = 1 if is_class else self.values.shape[1]
                cells[:width] = [None] * width
            votes = [self._class(int(slides.votes[place]))] if is_class else []
            yield [slide, int(slides.tiles[place]), *votes, *cells]

    def _told(self, labels: Tensor, values: Tensor) -> Iterable[list[object]]:
        if self.task.name == "classification":
            best = values.argmax(1).tolist()
            for label, predicted, row in zip(labels.tolist(), best, values.tolist(), strict=True):
                yield [self._class(label), self._class(predicted), *row]
            return
        for label, row in zip(labels.tolist(), values.tolist(), strict=True):
            yield [None if math.isnan(one) else one for one in label] + row

    def _class(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else str(number)


def errors_of(task: SampleTask, values: Tensor, labels: Tensor) -> Tensor:
    """(N,): 1 - the probability of the true class, or the mean distance to what is known, or NaN.

    Args:
        values: (N, columns), predictions.
        labels: (N,) or (N, columns).
    """
    if task.name == "classification":
        return 1 - values.gather(1, labels[:, None])[:, 0]
    return (values - labels).abs().nanmean(1)


def extremes(errors: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Samples and their errors: the worst and the best ones, the worst first; NaN are left out."""
    known = [(sample, error) for sample, error in errors if error == error]  # noqa: PLR0124
    ordered = sorted(known, key=lambda one: (-round(one[1], _DIGITS), one[0]))
    return ordered if len(ordered) <= 2 * SHOWN else ordered[:SHOWN] + ordered[-SHOWN:]
