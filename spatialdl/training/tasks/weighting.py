"""What classes count in a loss: as given, or balanced by how often they occur."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from omegaconf import ListConfig
from torch import Tensor

from spatialdl.data.image_source import ImageSource


def given_weights(
    value: object, key: str, classes: int, balanced: Callable[[], Tensor] | None
) -> Tensor | None:
    """float64 (classes,) of a setting: null, a list, or the word balanced.

    Raises:
        ValueError: if it is anything else.
    """
    if value is None:
        return None
    if value == "balanced" and balanced is not None:
        return balanced()
    choices = "null, a list, or balanced" if balanced else "null or a list"
    if not isinstance(value, ListConfig):
        raise ValueError(f"task.{key}={value} is unknown: take {choices}")
    numbers = list(value)
    if len(numbers) != classes:
        raise ValueError(f"task.{key} has {len(numbers)} weights for {classes} classes")
    good = all(
        isinstance(one, int | float) and not isinstance(one, bool) and isfinite(one) and one >= 0
        for one in numbers
    )
    if not good or not any(numbers):
        raise ValueError(f"task.{key}={numbers} must be numbers of at least 0, not all of them 0")
    return torch.tensor(numbers, dtype=torch.float64)


def balanced_classes(train: ImageSource, classes: int) -> Tensor:
    """N / (classes x samples of the class): all classes count alike over the training samples."""
    counts = torch.bincount(torch.from_numpy(train.labels), minlength=classes).double()
    _check(train, counts, "class_weights", "no training sample")
    return len(train) / (classes * counts)


def balanced_labels(train: ImageSource) -> Tensor:
    """Absent / present of every class, over the known labels of the training samples."""
    labels = torch.from_numpy(train.labels)
    present = (labels == 1).sum(0).double()
    _check(train, present, "pos_weight", "no training sample")
    return (labels == 0).sum(0) / present


def _check(train: ImageSource, counts: Tensor, key: str, what: str) -> None:
    without = [number for number, count in enumerate(counts.tolist()) if not count]
    if without:
        named = [train.classes[n] if n < len(train.classes) else str(n) for n in without]
        raise ValueError(
            f"task.{key}=balanced, but there is {what} of the class {', '.join(named[:5])}: give "
            "a list of weights"
        )
