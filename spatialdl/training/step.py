"""One training step: forward, backward, a check of NaN, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm import trace
from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.finite import Guard
from spatialdl.training.optimization.update import Update


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
        self._guard: Guard | None = None
        is_scaled = pipeline.mixed is torch.float16  # gradients of a scaled loss may overflow
        if config.trainer.stop_on_nan:
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

        return run() if self._guard is None else self._guard.run(step + 1, run)


_MIXUP = 0x6D697875  # separates the random stream from others of the same seed


def mixed(
    microbatches: Sequence[Microbatch],
    alpha: float,
    classes: int,
    seed: int,
    step: int,
    replica: int,
    replicas: int,
) -> list[Microbatch]:
    """Mix every sample with another of its slice; labels become shares of classes.

    Args:
        microbatches: micro-batches of this rank.
        alpha: parameter of Beta(alpha, alpha), the distribution of the first image's share, drawn
            once per slice.
        classes: classes of labels (N,).
        seed: seed of the run.
        step: steps done so far.
        replica: replica of this rank.
        replicas: number of replicas.
    """
    if alpha == 0:
        return list(microbatches)
    result = []
    for number, one in enumerate(microbatches):
        draw = np.random.default_rng([_MIXUP, seed, step, number * replicas + replica])
        share = float(draw.beta(alpha, alpha))
        partners = torch.from_numpy(draw.permutation(one.samples))
        tile, target = one.tile, one.target
        if target is not None and not target.is_floating_point():
            target = F.one_hot(target, classes).double()
        tile, target = (_mix(x, share, partners) for x in (tile, target))
        result.append(replace(one, tile=tile, target=target))
    return result


def _mix(x: Tensor | None, share: float, partners: Tensor) -> Tensor | None:
    if x is None:
        return None
    if not x.is_cpu:  # a copy from unpinned memory would make the host wait for the device
        partners = partners.pin_memory().to(x.device, non_blocking=True)
    return share * x + (1 - share) * x[partners]
