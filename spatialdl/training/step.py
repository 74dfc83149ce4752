"""One training step: forward, backward, optional NaN checks, update."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from spatialdl.comm import trace
from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.debug.detect_nan import NanWatch
from spatialdl.training.finite import Guard
from spatialdl.training.optimization.update import Update
from spatialdl.training.tasks.mixup import mixed


class TrainingStep:
    """Training steps of one rank; collective, all ranks run them together.

    Args:
        config: configuration of the run.
        pipeline: the network on its ranks.
        update: the update after backward.
        mixup: alpha of mixup, see `tasks.mixup`; 0 disables it.
        num_classes: classes of the targets.
        world: all ranks.
    """

    def __init__(
        self,
        config: DictConfig,
        pipeline: PipelineRuntime,
        update: Update,
        mixup: float,
        num_classes: int,
        world: Communicator,
    ) -> None:
        self._pipeline, self._update = pipeline, update
        self._mixup, self._num_classes, self._seed = mixup, num_classes, int(config.seed)
        self._watch: NanWatch | None = None
        self._guard: Guard | None = None
        is_scaled = pipeline.mixed is torch.float16  # gradients of a scaled loss may overflow
        if config.debug.name == "detect_nan":
            self._watch = NanWatch(pipeline, world, gradients=not is_scaled)
        elif config.trainer.stop_on_nan:
            self._guard = Guard(pipeline, world, gradients=not is_scaled)

    def run(self, batch: list[Microbatch], step: int) -> float:
        """Run one step.

        Args:
            batch: micro-batches of this rank.
            step: steps done so far.

        Returns:
            This rank's part of the loss of the whole batch.

        Raises:
            NotFinite: on all ranks, if a NaN check fails.
        """
        pipeline = self._pipeline
        microbatches = mixed(
            batch,
            self._mixup,
            self._num_classes,
            self._seed,
            step,
            pipeline.replica,
            pipeline.placement.data,
        )
        own = self._forward_and_backward(microbatches, step)
        with trace.span("compute", "optimizer"):
            self._update.step()
        return own

    def check_weights(self, step: int) -> None:
        """Check the weights before a checkpoint if ``trainer.stop_on_nan`` is set.

        Raises:
            NotFinite: on all ranks, if a weight on any rank is not finite.
        """
        if self._guard is not None:
            self._guard.check_weights(step)

    def _forward_and_backward(self, microbatches: list[Microbatch], step: int) -> float:
        """This rank's part of the loss, after the NaN checks of all ranks."""
        scale = self._update.scale

        def run() -> float:
            return self._pipeline.train_step(microbatches, step, scale)

        if self._guard is not None:
            return self._guard.run(step + 1, run)
        own = run()
        if self._watch is not None:
            self._watch.check(step + 1)
        return own
