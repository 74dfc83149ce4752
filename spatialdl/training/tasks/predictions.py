"""Predictions for all samples of a validation, and their tables.

predictions.csv   one row per sample: position, label, prediction
slides.csv        one row per slide: label and prediction aggregated over its tiles
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.common.files import save_table
from spatialdl.data.bags import BagSource
from spatialdl.data.image_source import ImageSource
from spatialdl.training.tasks.metrics import Scores
from spatialdl.training.tasks.survival import survival_columns
from spatialdl.training.tasks.task import SampleTask


@dataclass(frozen=True)
class Predictions:
    """Predictions of a network for all samples of a data set.

    Attributes:
        task: task of the network.
        outputs: float64 (N, columns), outputs of the network, in the order of the samples.
        source: the samples.
        names: names of the columns.
        numbers: numbers of the samples in the tables; None for 0, 1 ...
    """

    task: SampleTask
    outputs: Tensor
    source: ImageSource
    names: Sequence[str]
    numbers: Sequence[int] | None = None

    @cached_property
    def values(self) -> Tensor:
        """Probabilities or values, float64 (N, columns)."""
        return self.task.predictions(self.outputs)

    @cached_property
    def labels(self) -> Tensor:
        """Labels, (N,) or (N, columns)."""
        return torch.from_numpy(self.source.labels)

    @cached_property
    def slides(self) -> SlidePredictions | None:
        """Predictions of slides, if samples are tiles of slides; else None."""
        if not self._where or isinstance(self.source, BagSource):
            return None
        names = [one.slide for one in self._where]
        return to_slides(self.values, self.labels, names) if all(names) else None

    @cached_property
    def _where(self) -> list[Any]:
        """Metadata of every sample; empty for synthetic data."""
        sample = getattr(self.source, "sample", None)
        return [] if sample is None else [sample(number) for number in range(len(self.source))]

    def scores(self, own: Callable[[Tensor, Tensor], Scores] | None = None) -> Scores:
        """Loss and metrics of the samples, and of slides whose tiles share one label.

        Args:
            own: user's metrics, called with predictions and labels.
        """
        scores: Scores = {
            "loss": float(self.task.loss(self.outputs, self.labels)),
            "samples": len(self.labels),
            **self._metrics(self.values, self.labels, own),
        }
        slides = self.slides
        if slides is None:
            return scores
        agree = slides.agree
        scores["slides"] = int(agree.sum())
        of_slides = self._metrics(slides.means[agree], slides.labels[agree], own)
        for name, value in of_slides.items():
            if not isinstance(value, list):
                scores[f"slide_{name}"] = value
        if self.task.name == "classification":
            correct = (slides.votes == slides.labels)[agree]
            accuracy = float(correct.double().mean()) if len(correct) else None
            scores["slide_vote_accuracy"] = accuracy
        return scores

    def _metrics(
        self, values: Tensor, labels: Tensor, own: Callable[[Tensor, Tensor], Scores] | None
    ) -> Scores:
        scores = self.task.scores(values, labels)
        return scores if own is None else {**scores, **own(values, labels)}

    def write(self, folder: Path) -> None:
        """Write the tables atomically; ``slides.csv`` only if samples are tiles of slides."""
        save_table(folder / "predictions.csv", self._sample_head(), self._sample_rows())
        if self.slides is not None:
            save_table(folder / "slides.csv", self._slide_head(), self._slide_rows(self.slides))

    def _columns(self, prefix: str) -> list[str]:
        more = range(len(self.names), self.values.shape[1])  # a network may have more classes
        return [f"{prefix}{name}" for name in [*self.names, *map(str, more)]]

    def _labelled(self) -> list[str]:
        """Column names of labels and predictions."""
        if self.task.name == "classification":
            return ["label", "predicted", *self._columns("probability_")]
        if self.task.name == "survival":
            return [*self.names, *survival_columns(self.values.shape[1] - 1)]
        prefix = "probability_" if self.task.name == "multilabel" else "predicted_"
        return [*self._columns("label_"), *self._columns(prefix)]

    def _sample_head(self) -> list[str]:
        return ["sample", "slide", "x", "y", "split", *self._labelled()]

    def _slide_head(self) -> list[str]:
        votes = ["vote"] if self.task.name == "classification" else []
        return ["slide", "tiles", *votes, *self._labelled()]

    def _sample_rows(self) -> Iterable[list[object]]:
        numbers = range(len(self.labels)) if self.numbers is None else self.numbers
        rows = self._cells(self.labels, self.values)
        for place, (number, cells) in enumerate(zip(numbers, rows, strict=True)):
            one = self._where[place] if self._where else None
            where = [one.slide, one.x, one.y, one.split] if one is not None else [None] * 4
            yield [number, *where, *cells]

    def _slide_rows(self, slides: SlidePredictions) -> Iterable[list[object]]:
        rows = self._cells(slides.labels, slides.means)
        is_class = self.task.name == "classification"
        for place, (slide, cells) in enumerate(zip(slides.slides, rows, strict=True)):
            if not slides.agree[place]:
                width = 1 if is_class else self.values.shape[1]
                cells[:width] = [None] * width
            votes = [self._class(int(slides.votes[place]))] if is_class else []
            yield [slide, int(slides.tiles[place]), *votes, *cells]

    def _cells(self, labels: Tensor, values: Tensor) -> Iterable[list[object]]:
        if self.task.name == "classification":
            best = values.argmax(1).tolist()
            for label, predicted, row in zip(labels.tolist(), best, values.tolist(), strict=True):
                yield [self._class(label), self._class(predicted), *row]
            return
        for label, row in zip(labels.tolist(), values.tolist(), strict=True):
            yield [None if math.isnan(one) else one for one in label] + row

    def _class(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else str(number)


# --- from tiles to slides


class SlidePredictions(NamedTuple):
    """Predictions of S slides, in the order of the data set.

    Attributes:
        slides: S names.
        tiles: int64 (S,), number of tiles.
        means: float64 (S, columns), mean probabilities or values.
        votes: int64 (S,), the class predicted for most tiles; ties go to the larger mean.
        labels: (S,) or (S, columns), label of the first tile.
        agree: bool (S,), whether all tiles of the slide have this label.
    """

    slides: list[str]
    tiles: Tensor
    means: Tensor
    votes: Tensor
    labels: Tensor
    agree: Tensor


def to_slides(predictions: Tensor, labels: Tensor, slides: Sequence[str]) -> SlidePredictions:
    """Aggregate predictions of tiles by slide.

    Args:
        predictions: float64 (N, columns), predictions of tiles.
        labels: (N,) or (N, columns), where NaN equals NaN.
        slides: N names of slides.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(slides))}
    of_tiles = torch.tensor([numbers[name] for name in slides])
    counts = torch.bincount(of_tiles, minlength=len(numbers))
    columns = predictions.shape[1]
    sums = predictions.new_zeros(len(numbers), columns).index_add_(0, of_tiles, predictions)
    means = sums / counts[:, None]
    cells = of_tiles * columns + predictions.argmax(1)
    votes = torch.bincount(cells, minlength=len(numbers) * columns).view(-1, columns)
    most = votes == votes.amax(1, keepdim=True)
    chosen = torch.where(most, means, -torch.inf).argmax(1)

    # a slide has the label of its first tile
    first = torch.full((len(numbers),), len(slides)).scatter_reduce_(
        0, of_tiles, torch.arange(len(slides)), "amin"
    )
    expected = labels[first][of_tiles]
    alike = (labels == expected) | (labels.isnan() & expected.isnan())
    other = ~alike.flatten(1).all(1) if labels.dim() > 1 else ~alike
    agree = torch.bincount(of_tiles[other], minlength=len(numbers)) == 0
    return SlidePredictions(list(numbers), counts, means, chosen, labels[first], agree)
