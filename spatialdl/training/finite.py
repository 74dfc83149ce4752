"""``trainer.stop_on_nan``: no step changes the weights by a NaN or an infinite number.

After each backward the loss and the averaged gradients are looked at, no more: that is one pass
over as many numbers as the network has weights, and one small sum over the ranks. Where something
is not finite, the step is made again, from the same weights, samples and random numbers, while a
`NanWatch` looks at everything, and says where it began.
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
    """Looks at what this rank's steps come to; all ranks make it, and call it together.

    Args:
        pipeline: of the run.
        world: all ranks.
        gradients: whether to look at them; those of losses that are scaled for float16 may
            overflow, and the update sees to that.
    """

    def __init__(
        self, pipeline: PipelineRuntime, world: Communicator, gradients: bool = True
    ) -> None:
        self._pipeline, self._world, self._gradients = pipeline, world, gradients

    def run(self, step: int, work: Callable[[], float]) -> float:
        """Make the forward and backward of a step; its update is to follow.

        Args:
            step: its number.
            work: makes them, and returns this rank's part of the loss; once more if it has to.

        Returns:
            What it returned.

        Raises:
            NotFinite: on all ranks, if anything is not finite on any of them.
        """
        random = random_states(self._pipeline.device)
        loss = work()
        finite = math.isfinite(loss) and (not self._gradients or are_finite(self._grads()))
        spoilt = torch.tensor([not finite], dtype=torch.float64)
        if float(self._world.all_reduce(spoilt)) == 0:
            return loss
        ranks = [rank for rank, one in enumerate(self._world.allgather(finite)) if not one]
        watch = NanWatch(self._pipeline, self._world, gradients=self._gradients)
        restore_random(random, self._pipeline.device)
        work()
        watch.check(step)
        raise NotFinite(
            f"step {step}: the loss or a gradient was not finite on rank {ranks[0]}, but all was "
            "when the step was made again: a fault of that machine, or numbers that the network "
            "draws for itself"
        )

    def check_weights(self, step: int) -> None:
        """Before a checkpoint; the update itself may overflow.

        Raises:
            NotFinite: on all ranks, if a weight of any of them is not finite.
        """
        own = None
        if not are_finite(shard_of(one) for one in self._pipeline.parameters()):
            own = next(
                name
                for name, one in self._pipeline.named_parameters()
                if not are_finite([shard_of(one)])
            )
        found = self._world.allgather((own, socket.gethostname()))
        for rank, (name, host) in enumerate(found):
            if name is not None:
                raise NotFinite(
                    f"step {step}: {name} is no longer finite after the update, rank {rank} on "
                    f"{host}; no checkpoint of it is written"
                )

    def _grads(self) -> Iterable[Tensor]:
        return (shard_of(p.grad) for p in self._pipeline.parameters() if p.grad is not None)


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number in them is NaN or infinite; waits for the device once."""
    some = [one.detach() for one in tensors if one.numel()]
    if math.isfinite(float(get_total_norm(some))):  # much faster, and seldom too large for its type
        return True
    return all(bool(one.isfinite().all()) for one in some)
