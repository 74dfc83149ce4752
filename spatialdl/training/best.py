"""Best value of a validation metric, and the validations since then."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from spatialdl.data import fields

SMALLER = ("loss", "rmse", "mae")
"""Words in the names of metrics for which smaller is better."""

COUNTS = ("samples", "slides")

METRICS = {
    "classification": ("accuracy", "balanced_accuracy", "auroc", "f1"),
    "multilabel": ("accuracy", "balanced_accuracy", "auroc", "f1"),
    "regression": ("mae", "rmse", "r2"),
    "segmentation": ("accuracy", "mean_dice", "mean_iou", "balanced_accuracy"),
    "survival": ("c_index",),
}
"""Scalar metrics besides the loss, by task."""


def check_metric(
    metric: str | None, key: str, task: str, slides: bool, own: Collection[str] = ()
) -> None:
    """Check before training that validations of a task have a metric.

    Args:
        metric: name to check; None is accepted.
        key: key of the configuration, for messages.
        task: name of the task.
        slides: whether samples may be tiles of slides.
        own: names of metrics of the user; also prefixes of those with several values.

    Raises:
        ValueError: names the available metrics.
    """
    known = ["loss", *METRICS[task], *own]
    prefixes = [f"{name}_" for name in own]
    if slides and task != "segmentation":
        known += [f"slide_{name}" for name in (*METRICS[task], *own)]
        prefixes += [f"slide_{name}" for name in prefixes]
        known += ["slide_vote_accuracy"] if task == "classification" else []
    if metric is not None and metric not in known and not metric.startswith(tuple(prefixes)):
        names = ", ".join(known)
        raise ValueError(f"{key}={metric} is not a metric of this task: use one of {names}")


class Best:
    """Best value of a metric so far.

    Args:
        metric: name of a metric in `Validation.scores`; None tracks nothing.
        key: key of the configuration, for messages.
        min_delta: minimum improvement that counts.
        smaller: whether smaller is better; None decides by the name, see `SMALLER`.

    Attributes:
        value: best value; None before the first.
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

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Record a validation; return whether it is the best so far. None and NaN never are.

        Raises:
            ValueError: if the metric is missing or not a single number.
        """
        if self.metric is None:
            return False
        value = metrics.get(self.metric, [])
        if isinstance(value, list) or self.metric in COUNTS:
            numbers = (name for name, one in metrics.items() if not isinstance(one, list))
            known = ", ".join(name for name in numbers if name not in COUNTS)
            raise ValueError(
                f"{self._key}={self.metric} is not a metric of this task: use one of {known}"
            )
        if value is not None and self._is_better(value):
            self.value, self.worse = value, 0
            return True
        self.worse += 1
        return False

    def _is_better(self, value: float) -> bool:
        """Whether a value improves on the best one by more than `min_delta`."""
        if self.value is None:
            return not math.isnan(value)
        gain = self.value - value if self._smaller else value - self.value
        return gain > self._min_delta

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"metric": self.metric, "value": self.value, "worse": self.worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of the same metric; ignore that of another one."""
        if state.get("metric") == self.metric:
            self.value = None if state["value"] is None else float(state["value"])
            self.worse = fields.whole(state, "worse")
