"""Training progress and due actions, the same on every rank and saved in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from signal import Signals
from typing import Any

from omegaconf import DictConfig

from spatialdl.common import fields
from spatialdl.common.text import counted
from spatialdl.errors import CheckpointError


class TrainingProgress:
    """Progress of a run in steps, epochs and batches.

    Args:
        trainer: group ``trainer`` of the configuration.
        steps: optimizer steps of the whole run.
        batches: batches per epoch.
        smaller: called with a metric and the key that names it; returns whether smaller is better
            if it is a metric of the user, else None.

    Attributes:
        steps: optimizer steps of the whole run.
        step: optimizer steps done.
        epoch: epochs done.
        batch: batches done of the current epoch.
        stopped: signal that stops the run after this step; None without one.
        ended: reason of a callback to end the run after this step; None without one.
    """

    def __init__(
        self,
        trainer: DictConfig,
        steps: int,
        batches: int,
        smaller: Callable[[str | None, str], bool | None] = lambda _metric, _key: None,
    ) -> None:
        self._settings, self.steps, self._batches = trainer, steps, batches
        self.step = self.epoch = self.batch = 0
        self.stopped: Signals | None = None
        self.ended: str | None = None
        self._validated: int | None = None
        best, key = trainer.checkpoint.best, "trainer.checkpoint.best"
        self._best = Best(best, key, smaller=smaller(best, key))
        early, key = trainer.early_stopping, "trainer.early_stopping.metric"
        self._early = Best(early.metric, key, smaller=smaller(early.metric, key))

    def step_done(self) -> None:
        self.step += 1
        self.batch += 1
        if self.batch == self._batches:
            self.epoch, self.batch = self.epoch + 1, 0

    def is_over(self) -> bool:
        is_stopped = self.stopped is not None or self.ended is not None
        return is_stopped or self.step >= self.steps or self._is_stale()

    def _is_stale(self) -> bool:
        return self._early.worse >= int(self._settings.early_stopping.patience)

    def stopped_early(self) -> str:
        """Reason why a callback or early stopping ends the run; empty if neither does."""
        if self.stopped is not None or self.step >= self.steps:
            return ""
        if self.ended is not None:
            why = f": {self.ended}" if self.ended else ""
            return f"Stopped by a callback after step {self.step} of {self.steps}{why}."
        if not self._is_stale():
            return ""
        best = "none" if self._early.value is None else f"{self._early.value:.4g}"
        return (
            f"Stopped early after step {self.step} of {self.steps}: {self._early.metric} has not "
            f"improved on {best} in {counted(self._early.worse, 'validation')}."
        )

    def validation_is_due(self) -> bool:
        if self.stopped is not None or self._validated == self.step:
            return False
        every = self._settings.validate_every
        if self.step >= self.steps:
            return True
        if every is not None:
            return self.step % int(every) == 0
        return self.batch == 0

    @property
    def validations_an_epoch(self) -> float:
        """Average number of validations per epoch."""
        every = self._settings.validate_every
        return 1 if every is None else self._batches / int(every)

    def validated(self, metrics: Mapping[str, Any]) -> bool:
        """Record the metrics of a validation; return whether they are the best so far.

        Raises:
            ValueError: if a metric that the configuration names is missing.
        """
        self._validated = self.step
        self._early.update(metrics)
        return self._best.update(metrics)

    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due; always at the end of the run, however it ends."""
        every = self._settings.checkpoint.every_steps
        return self.is_over() or (self.batch if every is None else self.step % every) == 0

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "validated": self._validated,
            "best": self._best.state(),
            "early_stopping": self._early.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`.

        Raises:
            CheckpointError: if the state is invalid.
        """
        try:
            self.step, self.epoch, self.batch = (
                fields.whole(state, key) for key in ("step", "epoch", "batch")
            )
            self._validated = state["validated"]
            self._best.restore(fields.table(state, "best"))
            self._early.restore(fields.table(state, "early_stopping"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint has no valid training progress: {fields.missing(error)}"
            ) from error


def total_steps(trainer: DictConfig, batches: int) -> int:
    """Number of optimizer steps of a run with `batches` per epoch.

    Raises:
        ValueError: if it is zero.
    """
    limits = []
    if trainer.max_steps is not None:
        limits.append(int(trainer.max_steps))
    if trainer.max_epochs is not None:
        limits.append(int(trainer.max_epochs) * batches)
    if not limits or min(limits) < 1:
        raise ValueError(
            f"trainer.max_steps={trainer.max_steps} and trainer.max_epochs="
            f"{trainer.max_epochs} leave no step to train: set one of them to at least 1"
        )
    return min(limits)


# --- best value of a metric


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
        smaller: whether smaller is better; None decides by the name, see `SMALLER`.

    Attributes:
        value: best value; None before the first.
        worse: validations since then.
    """

    def __init__(self, metric: str | None, key: str, smaller: bool | None = None) -> None:
        self.metric, self._key = metric, key
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
        if self.value is None:
            return not math.isnan(value)
        return value < self.value if self._smaller else value > self.value

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"metric": self.metric, "value": self.value, "worse": self.worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of the same metric; ignore that of another one."""
        if state.get("metric") == self.metric:
            self.value = None if state["value"] is None else float(state["value"])
            self.worse = fields.whole(state, "worse")
