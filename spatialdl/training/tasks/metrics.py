"""Metrics of all validation samples together, in float64.

What is counted comes from torchmetrics' confusion matrices, and quotients of counts are taken here
in float64, as torchmetrics takes them in float32. A metric that is not defined is None: nothing
else is put in its place, and means leave it out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHOW_UP_TO = 100
"""Classes, beyond which a confusion matrix is left out."""

Scores = dict[str, Any]


@contextmanager
def in_float64() -> Iterator[None]:
    """Quotients of integers are float64 in here; torchmetrics' warnings are told in our words."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.set_default_dtype(before)


def classification_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Of one label a sample.

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
    found = from_pairs(pairs.double())
    scores = {
        **{name: found[name] for name in ("accuracy", "balanced_accuracy")},
        "auroc": _mean(areas),
        "f1": found["mean_dice"],
        "auroc_per_class": areas,
        "recall_per_class": found["recall"],
        "f1_per_class": found["dice"],
    }
    if classes <= SHOW_UP_TO:
        scores["confusion_matrix"] = pairs.tolist()
    return scores


def from_pairs(pairs: Tensor) -> Scores:
    """What follows from a confusion matrix; Dice is F1.

    Args:
        pairs: float64 (classes, classes or more), by true and predicted class;
            columns beyond the classes are wrong for all.
    """
    right, wanted = pairs.diagonal(), pairs.sum(1)
    either = wanted + pairs[:, : len(pairs)].sum(0)
    recall = _quotients(right, wanted)
    dice, iou = _quotients(2 * right, either), _quotients(right, either - right)
    return {
        "accuracy": float(right.sum() / pairs.sum()) if pairs.sum() else None,
        "balanced_accuracy": _mean(recall),
        "mean_dice": _mean(dice),
        "mean_iou": _mean(iou),
        "recall": recall,
        "dice": dice,
        "iou": iou,
    }


def multilabel_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Of any number of classes a sample, present from a probability of 0.5 on.

    Args:
        probabilities: float64 (N, classes).
        labels: (N, classes), NaN where nobody knows.
    """
    known = ~labels.isnan()
    pairs, areas = [], []
    for number, column in enumerate(known.T):
        told, wanted = probabilities[column, number], labels[column, number] > 0.5
        pairs.append(_binary_pairs(told, wanted))
        areas.append(_auroc(told, wanted))
    counts = torch.stack(pairs).double()  # (classes, absent or present, predicted)
    right = counts[:, 0, 0].sum() + counts[:, 1, 1].sum()
    f1 = _quotients(2 * counts[:, 1, 1], counts[:, 1].sum(1) + counts[:, :, 1].sum(1))
    balanced = [from_pairs(one)["balanced_accuracy"] for one in counts]
    return {
        "accuracy": float(right / counts.sum()) if counts.sum() else None,
        "balanced_accuracy": _mean(balanced),
        "auroc": _mean(areas),
        "f1": _mean(f1),
        "auroc_per_class": areas,
        "balanced_accuracy_per_class": balanced,
        "f1_per_class": f1,
        "confusion_matrix": counts.long().tolist(),
    }


def _binary_pairs(told: Tensor, wanted: Tensor) -> Tensor:
    from torchmetrics.functional.classification import binary_confusion_matrix

    if not len(told):
        return torch.zeros(2, 2, dtype=torch.int64)
    pairs: Tensor = binary_confusion_matrix((told >= 0.5).long(), wanted.long())
    return pairs


def _auroc(told: Tensor, wanted: Tensor) -> float | None:
    """None unless there are samples of the class and others."""
    from torchmetrics.functional.classification import binary_auroc

    if not wanted.any() or wanted.all():
        return None
    with in_float64():
        return float(binary_auroc(told, wanted.long()))


def regression_scores(values: Tensor, targets: Tensor) -> Scores:
    """Errors and the coefficient of determination, means over the targets.

    Args:
        values: float64 (N, targets).
        targets: (N, targets), NaN where nobody knows.
    """
    from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, r2_score

    absolute: list[float | None] = []
    root: list[float | None] = []
    determined: list[float | None] = []
    known = ~targets.isnan()
    for number, column in enumerate(known.T):
        told, wanted = values[column, number], targets[column, number].double()
        some, varies = len(wanted) > 0, len(wanted) > 1 and bool((wanted != wanted[0]).any())
        with in_float64():
            absolute.append(float(mean_absolute_error(told, wanted)) if some else None)
            root.append(float(mean_squared_error(told, wanted, squared=False)) if some else None)
            determined.append(float(r2_score(told, wanted)) if varies else None)
    return {
        **{"mae": _mean(absolute), "rmse": _mean(root), "r2": _mean(determined)},
        "mae_per_target": absolute,
        "rmse_per_target": root,
        "r2_per_target": determined,
    }


def undefined(scores: Scores) -> Scores:
    """None and empty lists in place of all that comes from predictions that are no numbers."""
    kept = ("loss", "samples", "slides")
    return {
        name: value if name in kept else [] if isinstance(value, list) else None
        for name, value in scores.items()
    }


def _quotients(above: Tensor, below: Tensor) -> list[float | None]:
    """None where there is nothing to divide by."""
    return [a / b if b else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def _mean(values: list[float | None]) -> float | None:
    """Over those that there are."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
