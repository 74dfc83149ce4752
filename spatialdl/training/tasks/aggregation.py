"""Aggregation of tile predictions to slide predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
