"""Curves: ROC and precision-recall, with the areas under them for weighted samples; survival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """Points from the highest threshold to the lowest, which includes all samples."""

    false_positive: Floats
    recall: Floats
    precision: Floats


class Ranking:
    """A ranking of samples by the score of one class; equal scores form one step.

    Args:
        scores: (N,).
        positive: bool (N,), whether a sample is of the class.
        unit: (N,), index of each sample's unit.
    """

    def __init__(
        self, scores: Floats, positive: npt.NDArray[np.bool_], unit: npt.NDArray[np.int64]
    ) -> None:
        order = np.argsort(-scores, kind="stable")
        ordered = scores[order]
        self._unit, self._positive = unit[order], positive[order].astype(np.float64)
        self._first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(order)])

    def areas(self, weights: Floats) -> tuple[Floats, Floats]:
        """Area under the ROC curve and average precision, (B,), for weights (B, units).

        Both are NaN unless there are positive and negative samples.
        """
        hits, misses = self._steps(weights)
        hits_until, misses_until = hits.cumsum(1), misses.cumsum(1)
        positives, negatives = hits.sum(1), misses.sum(1)
        below = negatives[:, None] - misses_until + misses / 2
        product = positives * negatives
        known = product > 0
        precision = hits_until / np.maximum(hits_until + misses_until, 1e-300)
        auroc = (hits * below).sum(1) / np.where(known, product, 1)
        average = (hits * precision).sum(1) / np.where(known, positives, 1)
        return np.where(known, auroc, np.nan), np.where(known, average, np.nan)

    def curve(self) -> Curve | None:
        """The curve of all samples; None unless there are positive and negative samples."""
        hits, misses = (part[0] for part in self._steps(None))
        if not hits.sum() or not misses.sum():
            return None
        until, wrong = hits.cumsum(), misses.cumsum()
        zero = np.zeros(1)
        return Curve(
            np.r_[zero, wrong / wrong[-1]],
            np.r_[zero, until / until[-1]],
            np.r_[np.ones(1), until / (until + wrong)],
        )

    def _steps(self, weights: Floats | None) -> tuple[Floats, Floats]:
        """Weights of positive and negative samples in each step, (B, steps)."""
        drawn = np.ones((1, len(self._unit))) if weights is None else weights[:, self._unit]
        if not len(self._first):
            return np.zeros((len(drawn), 1)), np.zeros((len(drawn), 1))
        hits = np.add.reduceat(drawn * self._positive, self._first, axis=1)
        return hits, np.add.reduceat(drawn, self._first, axis=1) - hits


def areas_of(rankings: Sequence[Ranking], weights: Floats) -> tuple[Floats, Floats]:
    """Areas under the ROC curves and average precisions of classes, (B, classes)."""
    areas = [ranking.areas(weights) for ranking in rankings]
    return np.stack([one for one, _ in areas], 1), np.stack([one for _, one in areas], 1)


def kaplan_meier(times: Floats, events: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Sorted event times and the estimated survival after each, both (E,).

    Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", J. Am. Stat. Assoc.
    53, 1958 (https://doi.org/10.1080/01621459.1958.10501452).

    Args:
        times: (N,), times of the event or of censoring.
        events: (N,), whether the event occurred.
    """
    found = np.unique(times[events])
    at_risk = (times[None] >= found[:, None]).sum(1)
    died = ((times[None] == found[:, None]) & events[None]).sum(1)
    return found, np.cumprod(1 - died / np.maximum(at_risk, 1))
