"""Tasks: classes or values per image, or a class per pixel."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, ListConfig
from torch import Tensor

from spatialdl.data.bags import BagSource
from spatialdl.data.image_source import ImageSource
from spatialdl.training.tasks.losses import (
    as_columns,
    check_classes,
    check_columns,
    classification_loss,
    classification_weights,
    known_labels,
    multilabel_loss,
    regression_loss,
)
from spatialdl.training.tasks.metrics import (
    Scores,
    classification_scores,
    multilabel_scores,
    regression_scores,
)
from spatialdl.training.tasks.own_loss import OwnLoss, own_loss_of
from spatialdl.training.tasks.segmentation import Segmentation
from spatialdl.training.tasks.survival import Cox, Survival, check_order, survival_edges


def task_of(settings: DictConfig, classes: int, train: ImageSource) -> Task:
    """Create the task of a configuration.

    Args:
        settings: group ``task`` of the configuration.
        classes: classes or targets of the data.
        train: training samples, for weights balanced by their labels.

    Raises:
        ValueError: if a setting is invalid.
    """
    name, own = settings.name, own_loss_of(settings)
    if name == "survival":
        return _survival(own, settings.loss, classes, train)
    if own is not None and name != "segmentation":
        plain = settings.copy()
        plain.loss = "mse" if name == "regression" else None
        task = task_of(plain, classes, train)
        assert not isinstance(task, Segmentation)
        return WithOwnLoss(task, own)
    smoothing = _share(settings, "label_smoothing") if "label_smoothing" in settings else 0.0
    mixup = _number(settings, "mixup") if "mixup" in settings else 0.0
    if name == "segmentation":
        weight = given_weights(settings.class_weights, "class_weights", classes, None)
        return Segmentation(classes, weight, smoothing, _number(settings, "dice"), own)
    if name == "multilabel":
        balanced = lambda: balanced_labels(train)  # noqa: E731
        weight = given_weights(settings.pos_weight, "pos_weight", classes, balanced)
        return MultiLabel(weight, smoothing, mixup)
    if name == "regression":
        if settings.loss not in ("mse", "l1", "huber"):
            raise ValueError(
                f"task.loss={settings.loss} is unknown: use mse, l1 or huber, or your own loss, "
                "task.loss._target_=package.Loss"
            )
        delta = _number(settings, "huber_delta")
        if delta == 0:
            raise ValueError("task.huber_delta=0 must be above 0")
        return Regression(settings.loss, delta, mixup)
    balanced = lambda: balanced_classes(train, classes)  # noqa: E731
    weight = given_weights(settings.class_weights, "class_weights", classes, balanced)
    of_bags = isinstance(train, BagSource)
    kind = BagClassification if of_bags else Classification
    return kind(weight, smoothing, mixup, classes, over_samples=of_bags)


def _survival(own: OwnLoss | None, loss: object, bins: int, train: ImageSource) -> Survival | Cox:
    if own is not None:
        raise ValueError(
            "task=survival does not support own losses: leave task.loss out, or use cox"
        )
    if loss == "cox":
        check_order(train)
        return Cox()
    return Survival(survival_edges(train, bins))


def _number(settings: DictConfig, key: str) -> float:
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"task.{key}={value} must be a number of at least 0")
    return float(value)


def _share(settings: DictConfig, key: str) -> float:
    value = _number(settings, key)
    if value > 1:
        raise ValueError(f"task.{key}={settings[key]} must lie between 0 and 1")
    return value


class Classification:
    """Classification: cross entropy with one label per sample.

    Args:
        weight: (classes,), class weights.
        label_smoothing: see `classification_loss`.
        mixup: alpha of mixup; 0 disables it.
        classes: classes of the data.
        over_samples: see `classification_loss`.
    """

    name = "classification"

    def __init__(
        self,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        classes: int | None = None,
        over_samples: bool = False,
    ) -> None:
        self.weight, self.label_smoothing, self.mixup = weight, label_smoothing, mixup
        self.classes, self.over_samples = classes, over_samples

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over labelled elements, the same on every rank of an image."""
        return classification_loss(
            *(output, target, self.weight, self.label_smoothing, self.classes),
            over_samples=self.over_samples,
        )

    def check_output(self, output: Tensor, target: Tensor) -> None:
        """Check the shape of an output against the targets, which may be meta tensors."""
        check_classes(output, target, self.weight, self.classes)

    def weights(self, target: Tensor) -> Tensor | None:
        """Weights of the samples in that mean, (N,); None if they are equal."""
        if self.weight is None or self.over_samples:
            return None
        return classification_weights(target, self.weight)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the network to probabilities or values, (N, columns)."""
        return outputs.softmax(1)

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        """Metrics by name: a number, a list with one per class, or None if undefined."""
        return classification_scores(predictions, labels)


class BagClassification(Classification):
    """Classification of bags, with auxiliary losses that a network returns in training.

    Such a network returns (N, 3 * classes): logits, then the auxiliary loss of each class if the
    bag has this class, then if it has another one; see `models.clam`.
    """

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if not self._has_more(output):
            return super().loss(output, target)
        assert self.classes is not None
        logits, own, other = torch.split(output, self.classes, 1)
        is_own = F.one_hot(target, self.classes).to(output.dtype)
        more = own * is_own + other * (1 - is_own)
        return super().loss(logits, target) + more.sum(1).mean()

    def check_output(self, output: Tensor, target: Tensor) -> None:
        more = self._has_more(output)
        super().check_output(output[:, : self.classes] if more else output, target)

    def _has_more(self, output: Tensor) -> bool:
        if not isinstance(output, Tensor) or output.dim() != 2 or self.classes is None:
            return False
        return output.shape[1] == 3 * self.classes


class MultiLabel:
    """Multi-label classification: binary cross entropy; some labels may be unknown."""

    name = "multilabel"

    def __init__(
        self, pos_weight: Tensor | None = None, label_smoothing: float = 0.0, mixup: float = 0.0
    ) -> None:
        self.pos_weight, self.label_smoothing, self.mixup = pos_weight, label_smoothing, mixup

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return multilabel_loss(output, target, self.pos_weight, self.label_smoothing)

    def check_output(self, output: Tensor, target: Tensor) -> None:
        check_columns(output, target, "classes")

    def weights(self, target: Tensor) -> Tensor | None:
        return known_labels(target).sum(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        return multilabel_scores(predictions, labels)


class Regression:
    """Regression: squared, absolute or Huber errors; some targets may be unknown."""

    name = "regression"

    def __init__(self, distance: Any = "mse", huber_delta: float = 1.0, mixup: float = 0.0) -> None:
        self.distance, self.huber_delta, self.mixup = distance, huber_delta, mixup

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return regression_loss(output, target, self.distance, self.huber_delta)

    def check_output(self, output: Tensor, target: Tensor) -> None:
        check_columns(as_columns(output, target), target, "targets")

    def weights(self, target: Tensor) -> Tensor | None:
        return known_labels(target).sum(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs if outputs.dim() > 1 else outputs.unsqueeze(1)

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        return regression_scores(predictions, labels)


class WithOwnLoss:
    """Task for whole images with a loss of the user."""

    def __init__(self, task: SampleTask, loss: OwnLoss) -> None:
        self.name: str = task.name
        self.mixup: float = task.mixup
        self._task, self._loss = task, loss

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.check_output(output, target)
        return self._loss(output, target)

    def check_output(self, output: Tensor, target: Tensor) -> None:
        """Check classes only, since a user's loss may accept any other output."""
        is_of_classes = isinstance(output, Tensor) and output.dim() == 2
        if isinstance(self._task, Classification) and is_of_classes:
            self._task.check_output(output, target)

    def weights(self, target: Tensor) -> Tensor | None:
        """None, since `training.layouts.check_task` keeps samples of a slice on one rank."""
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        return self._task.predictions(outputs)

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        return self._task.scores(predictions, labels)


SampleTask = Classification | MultiLabel | Regression | Survival | Cox | WithOwnLoss
"""Loss and metrics of predictions for whole images; `name` and `mixup` are of the configuration."""

Task = SampleTask | Segmentation


# --- class weights


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
