"""Weight update after backward: unscale, clip, step, average, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.optimization.ema import WeightAverage
from spatialdl.training.optimization.layer_wise import LayerWise
from spatialdl.training.optimization.optimizers import (
    check_elementwise,
    go_to_step,
    make_optimizer,
    make_scheduler,
)
from spatialdl.training.optimization.precision import LossScaler


class Update:
    """Weight updates of one rank.

    Args:
        config: configuration of the run.
        pipeline: the network on its ranks.
        batch: images per step.
        steps: steps of the run.
        steps_per_epoch: steps per epoch.

    Attributes:
        optimizer: optimizer of this rank's parameters.
        scheduler: learning-rate scheduler, stepped with the optimizer.
        scaler: loss scaler, for float16 only.
        average: average of the weights, if enabled.
        skipped: whether the last step was skipped because gradients overflowed.
        learning_rate: learning rate of the last step.
    """

    def __init__(
        self,
        config: DictConfig,
        pipeline: PipelineRuntime,
        *,
        batch: int,
        steps: int,
        steps_per_epoch: int,
    ) -> None:
        self._pipeline, self._clip_norm = pipeline, config.trainer.clip_norm
        make = partial(make_optimizer, config.optimizer, batch_size=batch)
        self.optimizer = make(pipeline.parameters())
        if isinstance(self.optimizer, LayerWise):
            self.optimizer.divided = pipeline.divided
        elif pipeline.placement.most_tensor_parts > 1:
            check_elementwise(make)
        self.scheduler = make_scheduler(config.scheduler, self.optimizer, steps, steps_per_epoch)
        self.scaler = LossScaler() if pipeline.mixed is torch.float16 else None
        decay = config.trainer.ema
        named = dict(pipeline.named_parameters())
        self.average = None if decay is None else WeightAverage(named, decay)
        self.skipped, self._logged_scale = False, 1.0
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])

    @property
    def scale(self) -> float:
        """Scale of this rank's loss in the next backward; losses sum to that of one process."""
        return 1.0 if self.scaler is None else self.scaler.scale / self._pipeline.loss_parts

    @property
    def log_values(self) -> dict[str, float]:
        """Additional columns of ``metrics.csv`` for the last step."""
        if self.scaler is None:
            return {}
        return {"loss_scale": self._logged_scale, "skipped": int(self.skipped)}

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the network has averaged weights, if enabled."""
        return nullcontext() if self.average is None else self.average.swapped()

    def step(self) -> None:
        """Update on all ranks, or on none if gradients overflow on any rank.

        A skipped step changes neither learning rate nor average.
        """
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.skipped = False
        if self.scaler is not None:
            self._logged_scale = self.scaler.scale
            self.skipped = not self._pipeline.gradients.unscale(self.scale)
            self.scaler.update(is_finite=not self.skipped)
        if self.skipped:
            return
        if self._clip_norm is not None:
            self._pipeline.gradients.clip(float(self._clip_norm))
        self.optimizer.step()
        self.scheduler.step()
        if self.average is not None:
            self.average.update()

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, besides optimizer and average."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"scheduler_steps": self.scheduler.last_epoch, "scaler": scaler}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; a changed scheduler applies as if set from the first step."""
        go_to_step(self.scheduler, state["scheduler_steps"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
