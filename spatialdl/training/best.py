"""The best value of a metric of the validation samples, and how long ago it was."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from spatialdl.data import fields

SMALLER = ("loss", "rmse", "mae")
"""Metrics with such a word in their name are the better the smaller they are."""

COUNTS = ("samples", "slides")

METRICS = {
    "classification": ("accuracy", "balanced_accuracy", "auroc", "f1"),
    "multilabel": ("accuracy", "balanced_accuracy", "auroc", "f1"),
    "regression": ("mae", "rmse", "r2"),
    "segmentation": ("accuracy", "mean_dice", "mean_iou", "balanced_accuracy"),
    "survival": ("c_index",),
}
"""Numbers that a validation tells beside the loss, by the task."""


def check_metric(
    metric: str | None, key: str, task: str, slides: bool, own: Collection[str] = ()
) -> None:
    """Refuse a metric that no validation of a task tells, before anything is trained.

    Args:
        key: of the configuration, for messages.
        task: its name.
        slides: whether samples may be tiles of slides.
        own: names of metrics of the user's; those that give several values, by names that begin so.

    Raises:
        ValueError: naming those that there are.
    """
    known = ["loss", *METRICS[task], *own]
    begins = [f"{name}_" for name in own]
    if slides and task != "segmentation":
        known += [f"slide_{name}" for name in (*METRICS[task], *own)]
        begins += [f"slide_{name}" for name in begins]
        known += ["slide_vote_accuracy"] if task == "classification" else []
    if metric is not None and metric not in known and not metric.startswith(tuple(begins)):
        raise ValueError(f"{key}={metric} is no metric here: take one of {', '.join(known)}")


class Best:
    """The best value of a metric so far.

    Args:
        metric: its name in what `Validation.scores` gives; the smallest value is the best of
            losses and errors (see `SMALLER`), the largest of others. None watches nothing.
        key: of the configuration, for messages.
        min_delta: by how much a value must be better to count.
        smaller: whether the smallest value is the best; None goes by the name.

    Attributes:
        value: the best one, None before the first.
        worse: validations since then.
    """

    def __init__(
        self, metric: str | None, key: str, min_delta: float = 0.0, smaller: bool | None = None
    ) -> None:
        self.metric, self._key, self._min_delta = metric, key, min_delta
        self._smaller = smaller
        if smaller is None:
            self._smaller = any(word in str(metric) for word in SMALLER)
        self.value: float | None = None
        self.worse = 0

    def update(self, found: Mapping[str, Any]) -> bool:
        """Whether the metrics of a validation are the best so far; one that is None never is.

        Raises:
            ValueError: if the metric is not among them, or not one number.
        """
        if self.metric is None:
            return False
        value = found.get(self.metric, [])
        if isinstance(value, list) or self.metric in COUNTS:
            numbers = (name for name, one in found.items() if not isinstance(one, list))
            known = ", ".join(name for name in numbers if name not in COUNTS)
            raise ValueError(f"{self._key}={self.metric} is no metric here: take one of {known}")
        if value is not None and self._is_better(value):
            self.value, self.worse = value, 0
            return True
        self.worse += 1
        return False

    def _is_better(self, value: float) -> bool:
        """NaN never is."""
        if self.value is None:
            return not math.isnan(value)
        gain = self.value - value if self._smaller else value - self.value
        return gain > self._min_delta

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"metric": self.metric, "value": self.value, "worse": self.worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there, if it is the same metric."""
        if state.get("metric") == self.metric:
            self.value = None if state["value"] is None else float(state["value"])
            self.worse = fields.whole(state, "worse")
