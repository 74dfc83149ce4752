"""``trainer.stop_on_nan``: stop before NaN or infinity reaches the weights.

After each backward only the loss and the averaged gradients are checked: one pass over as many
numbers as the network has weights, and one small all-reduce. If a value is not finite, the step is
repeated from the same weights, samples and random numbers with a `NanWatch`, which reports where
it began.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of
from spatialdl.errors import NotFinite
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.checkpoints.content import random_states, restore_random
from spatialdl.training.debug.detect_nan import NanWatch


class Guard:
    """Checks losses, gradients and weights of this rank; collective on all ranks.

    Args:
        pipeline: the network on its ranks.
        world: all ranks.
        gradients: whether to check gradients; not for losses scaled for float16, which may
            overflow and are handled by the update.
    """

    def __init__(
        self, pipeline: PipelineRuntime, world: Communicator, gradients: bool = True
    ) -> None:
        self._pipeline, self._world, self._gradients = pipeline, world, gradients

    def run(self, step: int, work: Callable[[], float]) -> float:
        """Run forward and backward of a step, before its update.

        Args:
            step: number of the step, for messages.
            work: runs them and returns this rank's part of the loss; called again after a failure.

        Returns:
            The result of `work`.

        Raises:
            NotFinite: on all ranks, if a value is not finite on any rank.
        """
        random = random_states(self._pipeline.device)
        loss = work()
        finite = math.isfinite(loss) and (not self._gradients or are_finite(self._grads()))
        failed = torch.tensor([not finite], dtype=torch.float64)
        if float(self._world.all_reduce(failed)) == 0:
            return loss
        ranks = [rank for rank, one in enumerate(self._world.allgather(finite)) if not one]
        watch = NanWatch(self._pipeline, self._world, gradients=self._gradients)
        restore_random(random, self._pipeline.device)
        work()
        watch.check(step)
        raise NotFinite(
            f"step {step}: the loss or a gradient was not finite on rank {ranks[0]}, but was "
            "finite when the step was repeated: a hardware fault, or the network uses its own "
            "random numbers"
        )

    def check_weights(self, step: int) -> None:
        """Check the weights before a checkpoint, since the update itself may overflow.

        Raises:
            NotFinite: on all ranks, if a weight on any rank is not finite.
        """
        own = None
        if not are_finite(shard_of(one) for one in self._pipeline.parameters()):
            own = next(
                name
                for name, one in self._pipeline.named_parameters()
                if not are_finite([shard_of(one)])
            )
        gathered = self._world.allgather((own, socket.gethostname()))
        for rank, (name, host) in enumerate(gathered):
            if name is not None:
                raise NotFinite(
                    f"step {step}: {name} is not finite after the update, rank {rank} on "
                    f"{host}; no checkpoint is written"
                )

    def _grads(self) -> Iterable[Tensor]:
        return (shard_of(p.grad) for p in self._pipeline.parameters() if p.grad is not None)


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite; waits for the device once."""
    nonempty = [one.detach() for one in tensors if one.numel()]
    if math.isfinite(float(get_total_norm(nonempty))):  # much faster, and rarely overflows
        return True
    return all(bool(one.isfinite().all()) for one in nonempty)
