"""What a pipeline may do otherwise than one process does by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from spatialdl.channels.uses import Plan
from spatialdl.comm.processes import Nodes
from spatialdl.pipeline.batch_loss import Width
from spatialdl.spatial.gather import Names
from spatialdl.streaming.memory import Memory


@dataclass(frozen=True)
class PipelineOptions:
    """How a `Pipeline` works; what is left out does as one process does.

    Attributes:
        cut: layers before which to cut, see `pipeline.partition.cut`.
        balance: what is alike in all stages where `cut` does not say, see `pipeline.balance`.
        gather_before: modules that get whole images, see `spatial.gather`.
        recompute: "block" or "stage" if these run again in backward, see `spatial.recompute`.
        sync_batchnorm: whether BatchNorm sees a micro-batch's samples on all data replicas.
        seed: of the random numbers that the network draws in training.
        backend: of torch.distributed, through which gradients are averaged; None for that of the
            pipeline's ranks, see `comm.groups`; with one they must be all ranks of the world.
        shard_state: whether data replicas share parameters, gradients and optimizer state out
            among them, over `backend` or that of the ranks, see `pipeline.sharded`.
        device: of stages and tensors; by default the CPU.
        mixed: float16 or bfloat16 if stages and loss run under autocast to it.
        nodes: of the ranks, if gradients are to be averaged by nodes where that saves time.
        compiled: whether stages are compiled, see `pipeline.compiled`.
        tensor_plan: how weights are divided by channels where that is not to be found out, see
            `channels.uses.check_plan`.
        sample_weights: how much the samples of a target count in the mean of the criterion, (N,);
            None, or where it gives None, all alike.
        memory: holds what virtual tiles need later, if ranks have any (`Placement.stream`).
        batch_loss: the columns of outputs and targets, if the criterion compares the samples of a
            batch, see `pipeline.batch_loss`; of networks of one stage.
    """

    cut: Names = None
    balance: Literal["time", "measured", "memory"] = "time"
    gather_before: Names = None
    recompute: Literal["none", "block", "stage"] = "none"
    sync_batchnorm: bool = False
    seed: int = 0
    backend: str | None = None
    shard_state: bool = False
    device: torch.device | None = None
    mixed: torch.dtype | None = None
    nodes: Nodes | None = None
    compiled: bool = False
    tensor_plan: Plan = field(default_factory=dict)
    sample_weights: Callable[[Tensor], Tensor | None] | None = None
    memory: Memory | None = None
    batch_loss: Width | None = None
