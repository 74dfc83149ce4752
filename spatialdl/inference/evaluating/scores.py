"""Metrics of weighted samples, for all resamples at once; NaN where undefined.

With equal weights they equal those of `training.tasks.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CELLS = 2**22  # pairs of samples at a time
BINS = 15
"""Bins of confidence for the calibration error."""


class Scores:
    """Samples whose metrics can be computed for any weights of their units.

    Args:
        values: (N, classes or targets), predictions.
        truth: (N,) or (N, classes), labels.
        unit: (N,), index of each sample's unit.
    """

    def __init__(self, values: npt.NDArray[Any], truth: npt.NDArray[Any], unit: Ints) -> None:
        self.values, self.truth, self.unit = values, truth, unit
        self.samples, self.classes = values.shape[:2]
        self.units = int(unit.max()) + 1 if len(unit) else 0

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        """Metrics by name, (B,) or (B, classes), for weights (B, units)."""
        raise NotImplementedError

    def _counts(self, unit: Ints, cells: Ints, count: int, weights: Any = 1.0) -> sparse.csr_array:
        """Sums (units, count) of the weights of samples in each cell."""
        each = np.broadcast_to(weights, len(cells)).astype(np.float64)
        return sparse.coo_array((each, (unit, cells)), (self.units, count)).tocsr()

    def _sums(self, part: npt.NDArray[Any]) -> Floats:
        sums = np.zeros((self.units, *part.shape[1:]))
        np.add.at(sums, self.unit, part.astype(np.float64))
        return sums


class ClassScores(Scores):
    """Scores of classification, one class per sample.

    Values are probabilities (N, classes), truth class indices (N,).
    """

    @cached_property
    def _pairs(self) -> sparse.csr_array:
        cells = self.truth * self.classes + self.values.argmax(1)
        return self._counts(self.unit, cells, self.classes**2)

    @cached_property
    def _rankings(self) -> list[Ranking]:
        columns = range(self.classes)
        return [Ranking(self.values[:, k], self.truth == k, self.unit) for k in columns]

    @cached_property
    def _bins(self) -> list[sparse.csr_array]:
        """Per unit and bin: number of samples, sum of confidence, number of correct samples."""
        confidence = self.values.max(1)
        right = self.values.argmax(1) == self.truth
        at = bins_of(confidence)
        parts = (1.0, confidence, right)
        return [self._counts(self.unit, at, BINS + 1, weights) for weights in parts]

    def confusion(self, weights: Floats) -> Floats:
        """Confusion matrices (B, classes, classes), by true and predicted class."""
        flat = (self._pairs.T @ weights.T).T
        return np.asarray(flat).reshape(len(weights), self.classes, self.classes)

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        auroc, precision = areas_of(self._rankings, weights)
        found = from_confusion(self.confusion(weights))
        return {
            "accuracy": found["accuracy"],
            "balanced_accuracy": found["balanced_accuracy"],
            "auroc": mean_over(auroc),
            "average_precision": mean_over(precision),
            "f1": mean_over(found["dice"]),
            "calibration_error": self._calibration_error(weights),
            "auroc_per_class": auroc,
            "average_precision_per_class": precision,
            "recall_per_class": found["recall"],
            "precision_per_class": found["precision"],
            "f1_per_class": found["dice"],
        }

    def _calibration_error(self, weights: Floats) -> Floats:
        """Expected calibration error (Guo et al., 2017, section 2), of the predicted class."""
        count, confidence, right = (np.asarray((one.T @ weights.T).T) for one in self._bins)
        return divided(np.abs(confidence - right).sum(1), count.sum(1))


class LabelScores(Scores):
    """Scores of multi-label classification; a class is predicted from probability 0.5.

    Values are probabilities (N, classes); truth (N, classes) is 0 or 1, NaN where unknown.
    """

    @cached_property
    def _pairs(self) -> sparse.csr_array:
        row, column = np.nonzero(~np.isnan(self.truth))
        true, predicted = self.truth[row, column] > 0.5, self.values[row, column] >= 0.5
        return self._counts(self.unit[row], column * 4 + 2 * true + predicted, 4 * self.classes)

    @cached_property
    def _rankings(self) -> list[Ranking]:
        found = []
        for k, truth in enumerate(self.truth.T):
            known = ~np.isnan(truth)
            found.append(Ranking(self.values[known, k], truth[known] > 0.5, self.unit[known]))
        return found

    def confusion(self, weights: Floats) -> Floats:
        """Confusion matrices (B, classes, 2, 2), absent or present, by truth and prediction."""
        return np.asarray((self._pairs.T @ weights.T).T).reshape(-1, self.classes, 2, 2)

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        auroc, precision = areas_of(self._rankings, weights)
        pairs = self.confusion(weights)
        hits, predicted, actual = pairs[..., 1, 1], pairs[..., 1].sum(-1), pairs[..., 1, :].sum(-1)
        f1 = divided(2 * hits, predicted + actual)
        recalls = divided(np.stack([pairs[..., 0, 0], hits], -1), pairs.sum(-1))
        balanced = mean_over(recalls)
        right = (pairs[..., 0, 0] + hits).sum(1)
        return {
            "accuracy": divided(right, pairs.sum((1, 2, 3))),
            "balanced_accuracy": mean_over(balanced),
            "auroc": mean_over(auroc),
            "average_precision": mean_over(precision),
            "f1": mean_over(f1),
            "auroc_per_class": auroc,
            "average_precision_per_class": precision,
            "balanced_accuracy_per_class": balanced,
            "recall_per_class": recalls[..., 1],
            "precision_per_class": divided(hits, predicted),
            "f1_per_class": f1,
        }


class NumberScores(Scores):
    """Scores of regression: predictions and truth (N, targets), NaN where unknown."""

    def __init__(self, values: Floats, truth: Floats, unit: Ints) -> None:
        super().__init__(values, truth, unit)
        known = ~np.isnan(truth)
        error = np.where(known, values - truth, 0.0)
        count = np.maximum(known.sum(0), 1)
        middle = np.where(known, truth, 0.0).sum(0) / count
        deviation = np.where(known, truth - middle, 0.0)  # avoids cancellation in the variance
        parts = (known, np.abs(error), error**2, deviation, deviation**2)
        self._by_unit = [self._sums(part) for part in parts]

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        count, absolute, squared, deviation, varied = (weights @ sums for sums in self._by_unit)
        mae, rmse = divided(absolute, count), np.sqrt(divided(squared, count))
        spread = varied - divided(deviation**2, count)
        varies = spread > 1e-12 * np.maximum(varied, 1e-300)
        r2 = 1 - divided(squared, np.where(varies, spread, 0.0))
        return {
            **{"mae": mean_over(mae), "rmse": mean_over(rmse), "r2": mean_over(r2)},
            **{"mae_per_target": mae, "rmse_per_target": rmse, "r2_per_target": r2},
        }


class PixelScores(Scores):
    """Scores of segmentation.

    `mean_dice` and `mean_iou` are computed from the pixels of all images together, `image_dice` and
    `image_iou` are means over images. Values are pixels (images, classes, classes) by true and
    predicted class; there is no other truth.
    """

    def __init__(self, values: Ints, truth: Ints, unit: Ints) -> None:
        super().__init__(values, truth, unit)
        self._pairs = self._sums(values.reshape(self.samples, -1))
        self.of_images = from_confusion(values.astype(np.float64))

    def confusion(self, weights: Floats) -> Floats:
        """Confusion matrices (B, classes, classes), by true and predicted class."""
        return (weights @ self._pairs).reshape(-1, self.classes, self.classes)

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        found = from_confusion(self.confusion(weights))
        drawn = weights[:, self.unit]
        dice, iou = (_means(drawn, self.of_images[name]) for name in ("dice", "iou"))
        return {
            **{name: found[name] for name in ("accuracy", "balanced_accuracy")},
            **{name: found[name] for name in ("mean_dice", "mean_iou")},
            **{"image_dice": mean_over(dice), "image_iou": mean_over(iou)},
            **{"dice_per_class": found["dice"], "iou_per_class": found["iou"]},
            **{"image_dice_per_class": dice, "image_iou_per_class": iou},
        }


class SurvivalScores(Scores):
    """Scores of survival predictions.

    Values are risks (N, 1); truth (N, 2) is the time, and 1 for an event or 0 for censoring.
    """

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        """Harrell's concordance index (B,), see `training.tasks.concordance`.

        A pair is weighted by the product of its samples' weights.
        """
        drawn, all_risks = weights[:, self.unit], self.values[:, 0]
        all_times, events = self.truth[:, 0], self.truth[:, 1] == 1
        right, pairs = np.zeros(len(weights)), np.zeros(len(weights))
        first = np.flatnonzero(events)
        step = max(1, _CELLS // max(self.samples, 1))
        for some in (first[k : k + step] for k in range(0, len(first), step)):
            times, risks = all_times[some, None], all_risks[some, None]
            known = (times < all_times) | ((times == all_times) & ~events)
            higher = 0.5 * ((risks > all_risks) + 1.0 * (risks >= all_risks)) * known
            right += (drawn[:, some] * (drawn @ higher.T)).sum(1)
            pairs += (drawn[:, some] * (drawn @ known.T)).sum(1)
        return {"c_index": divided(right, pairs)}


def from_confusion(pairs: Floats) -> dict[str, Floats]:
    """Metrics of confusion matrices (B, classes, classes); Dice equals F1."""
    right = np.diagonal(pairs, axis1=1, axis2=2)
    actual, predicted = pairs.sum(2), pairs.sum(1)
    dice, iou = divided(2 * right, actual + predicted), divided(right, actual + predicted - right)
    recall = divided(right, actual)
    return {
        "accuracy": divided(right.sum(1), pairs.sum((1, 2))),
        "balanced_accuracy": mean_over(recall),
        "mean_dice": mean_over(dice),
        "mean_iou": mean_over(iou),
        **{"recall": recall, "precision": divided(right, predicted), "dice": dice, "iou": iou},
    }


def bins_of(confidence: Floats) -> Ints:
    """The bin of each sample, of width 1 / `BINS`; a confidence of 1 has a separate bin."""
    edges = np.linspace(0, 1, BINS + 1)
    return np.clip(np.searchsorted(edges, confidence, "right") - 1, 0, BINS)


def divided(above: Floats, below: Floats) -> Floats:
    """Divide, with NaN where `below` is not positive."""
    found: Floats = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=found, where=below > 0)
    return found


def mean_over(values: Floats) -> Floats:
    """The mean over the last dim, ignoring NaN."""
    known = ~np.isnan(values)
    return divided(np.where(known, values, 0.0).sum(-1), known.sum(-1).astype(np.float64))


def _means(weights: Floats, values: Floats) -> Floats:
    """Weighted means (B, classes) by weights (B, N) of values (N, classes), ignoring NaN."""
    known = ~np.isnan(values)
    return divided(weights @ np.where(known, values, 0.0), weights @ known.astype(np.float64))


# --- curves


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
