"""Metrics over all validation samples, in float64.

They are few lines of PyTorch, as importing torchmetrics takes each rank 4 s of a CPU (it imports
SciPy, Matplotlib and, where installed, transformers), more than PyTorch itself, and its quotients
are float32. An undefined metric is None and left out of means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHOW_UP_TO = 100
"""Maximum number of classes with a confusion matrix."""

Scores = dict[str, Any]


def classification_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Metrics of samples with one label.

    Args:
        probabilities: float64 (N, classes).
        labels: int64 (N,).
    """
    classes = probabilities.shape[1]
    pairs = _confusion_matrix(probabilities.argmax(1), labels, classes)
    areas = [_auroc(probabilities[:, number], labels == number) for number in range(classes)]
    of_pairs = from_pairs(pairs.double())
    scores = {
        **{name: of_pairs[name] for name in ("accuracy", "balanced_accuracy")},
        "auroc": _mean(areas),
        "f1": of_pairs["mean_dice"],
        "auroc_per_class": areas,
        "recall_per_class": of_pairs["recall"],
        "f1_per_class": of_pairs["dice"],
    }
    if classes <= SHOW_UP_TO:
        scores["confusion_matrix"] = pairs.tolist()
    return scores


def from_pairs(pairs: Tensor) -> Scores:
    """Metrics of a confusion matrix; Dice is F1.

    Args:
        pairs: float64 (classes, classes or more), by true and predicted class; predictions in
            columns beyond the classes are wrong.
    """
    correct, true = pairs.diagonal(), pairs.sum(1)
    either = true + pairs[:, : len(pairs)].sum(0)
    recall = _quotients(correct, true)
    dice, iou = _quotients(2 * correct, either), _quotients(correct, either - correct)
    return {
        "accuracy": float(correct.sum() / pairs.sum()) if pairs.sum() else None,
        "balanced_accuracy": _mean(recall),
        "mean_dice": _mean(dice),
        "mean_iou": _mean(iou),
        "recall": recall,
        "dice": dice,
        "iou": iou,
    }


def multilabel_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Metrics of samples with several labels; a class is predicted from a probability of 0.5.

    Args:
        probabilities: float64 (N, classes).
        labels: (N, classes), NaN if unknown.
    """
    known = ~labels.isnan()
    pairs, areas = [], []
    for number, column in enumerate(known.T):
        predicted, true = probabilities[column, number], labels[column, number] > 0.5
        pairs.append(_confusion_matrix((predicted >= 0.5).long(), true.long(), 2))
        areas.append(_auroc(predicted, true))
    counts = torch.stack(pairs).double()  # (classes, absent or present, predicted)
    correct = counts[:, 0, 0].sum() + counts[:, 1, 1].sum()
    f1 = _quotients(2 * counts[:, 1, 1], counts[:, 1].sum(1) + counts[:, :, 1].sum(1))
    balanced = [from_pairs(one)["balanced_accuracy"] for one in counts]
    return {
        "accuracy": float(correct / counts.sum()) if counts.sum() else None,
        "balanced_accuracy": _mean(balanced),
        "auroc": _mean(areas),
        "f1": _mean(f1),
        "auroc_per_class": areas,
        "balanced_accuracy_per_class": balanced,
        "f1_per_class": f1,
        "confusion_matrix": counts.long().tolist(),
    }


def _confusion_matrix(predicted: Tensor, true: Tensor, classes: int) -> Tensor:
    """Counts (classes, classes) of samples by true and predicted class, int64."""
    pairs = torch.bincount(true * classes + predicted, minlength=classes**2)
    return pairs.view(classes, classes)


def _auroc(predicted: Tensor, true: Tensor) -> float | None:
    """AUROC of a class; None without samples of the class or of other classes.

    It is Mann and Whitney's U over the number of pairs: a sample's rank, of which equal predictions
    share the mean, counts the samples below it.

    Args:
        predicted: float64 (N,).
        true: bool (N,).
    """
    positive = int(true.sum())
    pairs = positive * (len(true) - positive)
    if not pairs:
        return None
    _, place, times = torch.unique(predicted, return_inverse=True, return_counts=True)
    rank = times.cumsum(0) - (times - 1).double() / 2  # from 1
    wins = rank[place[true]].sum() - positive * (positive + 1) / 2
    return float(wins / pairs)


def regression_scores(values: Tensor, targets: Tensor) -> Scores:
    """Errors and coefficient of determination, per target and averaged over targets.

    Args:
        values: float64 (N, targets), predictions.
        targets: (N, targets), NaN if unknown.
    """
    absolute: list[float | None] = []
    root: list[float | None] = []
    determined: list[float | None] = []
    known = ~targets.isnan()
    for number, column in enumerate(known.T):
        predicted, true = values[column, number], targets[column, number].double()
        errors = predicted - true
        some, varies = len(true) > 0, len(true) > 1 and bool((true != true[0]).any())
        absolute.append(float(errors.abs().mean()) if some else None)
        root.append(float(errors.square().mean().sqrt()) if some else None)
        spread = (true - true.mean()).square().sum()
        determined.append(float(1 - errors.square().sum() / spread) if varies else None)
    return {
        **{"mae": _mean(absolute), "rmse": _mean(root), "r2": _mean(determined)},
        "mae_per_target": absolute,
        "rmse_per_target": root,
        "r2_per_target": determined,
    }


def undefined(scores: Scores) -> Scores:
    """Replace the metrics of non-finite predictions by None and empty lists."""
    kept = ("loss", "samples", "slides")
    return {
        name: value if name in kept else [] if isinstance(value, list) else None
        for name, value in scores.items()
    }


def _quotients(above: Tensor, below: Tensor) -> list[float | None]:
    """Elementwise quotients; None for a denominator of 0."""
    return [a / b if b else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def _mean(values: list[float | None]) -> float | None:
    """Mean of the defined values; None if there are none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
