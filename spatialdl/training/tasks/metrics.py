"""Metrics over all validation samples, in float64.

Counts come from torchmetrics' confusion matrices; quotients are computed here in float64, where
torchmetrics uses float32. An undefined metric is None and left out of means.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHOW_UP_TO = 100
"""Maximum number of classes with a confusion matrix."""

Scores = dict[str, Any]


@contextmanager
def in_float64() -> Iterator[None]:
    """Context with float64 as default dtype and without torchmetrics' warnings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.set_default_dtype(before)


def classification_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Metrics of samples with one label.

    Args:
        probabilities: float64 (N, classes).
        labels: int64 (N,).
    """
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    classes = probabilities.shape[1]
    if classes == 1:
        pairs = torch.tensor([[len(labels)]])
    else:
        pairs = multiclass_confusion_matrix(probabilities.argmax(1), labels, classes)
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
        pairs.append(_binary_pairs(predicted, true))
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


def _binary_pairs(predicted: Tensor, true: Tensor) -> Tensor:
    from torchmetrics.functional.classification import binary_confusion_matrix

    if not len(predicted):
        return torch.zeros(2, 2, dtype=torch.int64)
    pairs: Tensor = binary_confusion_matrix((predicted >= 0.5).long(), true.long())
    return pairs


def _auroc(predicted: Tensor, true: Tensor) -> float | None:
    """AUROC of a class; None without samples of the class or of other classes."""
    from torchmetrics.functional.classification import binary_auroc

    if not true.any() or true.all():
        return None
    with in_float64():
        return float(binary_auroc(predicted, true.long()))


def regression_scores(values: Tensor, targets: Tensor) -> Scores:
    """Errors and coefficient of determination, per target and averaged over targets.

    Args:
        values: float64 (N, targets), predictions.
        targets: (N, targets), NaN if unknown.
    """
    from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, r2_score

    absolute: list[float | None] = []
    root: list[float | None] = []
    determined: list[float | None] = []
    known = ~targets.isnan()
    for number, column in enumerate(known.T):
        predicted, true = values[column, number], targets[column, number].double()
        some, varies = len(true) > 0, len(true) > 1 and bool((true != true[0]).any())
        with in_float64():
            absolute.append(float(mean_absolute_error(predicted, true)) if some else None)
            root.append(float(mean_squared_error(predicted, true, squared=False)) if some else None)
            determined.append(float(r2_score(predicted, true)) if varies else None)
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
