"""Class weights of losses: configured, or balanced by frequency."""

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
    """Parse class weights, float64 (classes,): null, a list, or "balanced".

    Raises:
        ValueError: if the setting is anything else.
    """
    if value is None:
        return None
    if value == "balanced" and balanced is not None:
        return balanced()
    choices = "null, a list, or balanced" if balanced else "null or a list"
    if not isinstance(value, ListConfig):
        raise ValueError(f"task.{key}={value} is unknown: use {choices}")
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
    """N / (classes x samples of the class): equal total weight of all classes in training."""
    counts = torch.bincount(torch.from_numpy(train.labels), minlength=classes).double()
    _check(train, counts, "class_weights")
    return len(train) / (classes * counts)


def balanced_labels(train: ImageSource) -> Tensor:
    """Ratio of absent to present labels per class, over the known training labels."""
    labels = torch.from_numpy(train.labels)
    present = (labels == 1).sum(0).double()
    _check(train, present, "pos_weight")
    return (labels == 0).sum(0) / present


def _check(train: ImageSource, counts: Tensor, key: str) -> None:
    without = [number for number, count in enumerate(counts.tolist()) if not count]
    if without:
        named = [train.classes[n] if n < len(train.classes) else str(n) for n in without]
        raise ValueError(
            f"task.{key}=balanced, but there is no training sample of the class "
            f"{', '.join(named[:5])}: set a list of weights"
        )
