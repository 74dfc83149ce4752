"""Options of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spatialdl.spatial.channels.weights import Plan
from spatialdl.spatial.split import Names
from spatialdl.spatial.streaming.memory import Memory

CPU = torch.device("cpu")


class Width(NamedTuple):
    """Columns of an output and of a target."""

    output: int
    target: int


@dataclass(frozen=True)
class PipelineOptions:
    """How a `Pipeline` works; the defaults match training in a single process.

    Attributes:
        cut: layers at which stages begin, see `pipeline.partition.cut`.
        gather_before: modules that get whole images, see `spatial.split`.
        recompute: "block" or "stage" to recompute these in backward, see `spatial.recompute`.
        sync_batchnorm: whether BatchNorm normalizes over the samples of all data replicas.
        seed: of the random numbers that the network draws in training.
        shard_state: whether data replicas shard parameters, gradients and optimizer state, see
            `pipeline.sharded`.
        backend: of torch.distributed, to shard state; must span all ranks of the world. None for
            that of the pipeline's ranks, see `comm.groups`.
        device: of stages and tensors.
        mixed: float16 or bfloat16 to run stages and loss under autocast.
        tensor_plan: how weights are divided by channels where it cannot be inferred, see
            `channels.weights.check_plan`.
        sample_weights: maps targets to weights (N,) of samples in the mean of the criterion;
            None, or a result of None, for equal weights.
        memory: stores tensors of virtual tiles, if ranks have any (`Placement.stream`).
        batch_loss: columns of outputs and targets, if the criterion compares the samples of a
            batch, see `pipeline.batch_loss`; for networks of one stage.
    """

    cut: Names = None
    gather_before: Names = None
    recompute: Literal["none", "block", "stage"] = "none"
    sync_batchnorm: bool = False
    seed: int = 0
    backend: str | None = None
    shard_state: bool = False
    device: torch.device = CPU
    mixed: torch.dtype | None = None
    tensor_plan: Plan = field(default_factory=dict)
    sample_weights: Callable[[Tensor], Tensor | None] | None = None
    memory: Memory | None = None
    batch_loss: Width | None = None
