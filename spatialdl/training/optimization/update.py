"""Weight update after backward: unscale, clip, step, average, schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from spatialdl.comm.gradients import shard_of
from spatialdl.pipeline.runtime import PipelineRuntime
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
        steps: steps of the run.

    Attributes:
        optimizer: optimizer of this rank's parameters.
        scheduler: learning-rate scheduler, stepped with the optimizer.
        scaler: loss scaler, for float16 only.
        average: average of the weights, if enabled.
        skipped: whether the last step was skipped because gradients overflowed.
        learning_rate: learning rate of the last step.
    """

    def __init__(self, config: DictConfig, pipeline: PipelineRuntime, *, steps: int) -> None:
        self._pipeline, self._clip_norm = pipeline, config.trainer.clip_norm
        make = partial(make_optimizer, config.optimizer)
        self.optimizer = make(pipeline.parameters())
        if isinstance(self.optimizer, LayerWise):
            self.optimizer.divided = pipeline.divided
        elif pipeline.placement.most_tensor_parts > 1:
            check_elementwise(make)
        self.scheduler = make_scheduler(config.scheduler, self.optimizer, steps)
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


class WeightAverage:
    """Average of parameters over the steps, initialised with their current values.

    Buffers, such as BatchNorm statistics, are averages already and are not averaged again.

    Args:
        parameters: parameters by name.
        decay: weight of the old average in a step, in [0, 1).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = dict(parameters), float(decay)
        self._averages = {
            name: parameter.detach().clone() for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step."""
        for average, parameter in self._pairs():
            average.lerp_(parameter, 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the averages into the network; restore its weights bit for bit afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by parameter name, sharded like the parameters."""
        return dict(self._averages)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in self._pairs():
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Local shards of averages and parameters."""
        for name, average in self._averages.items():
            yield shard_of(average), shard_of(self._parameters[name].detach())
