"""Gradients of the stages that a rank holds: averaged, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer, Replicated, shard_of

if TYPE_CHECKING:
    from spatialdl.pipeline.sharded import ShardedStage


class Gradients:
    """Those of a pipeline; all its ranks call it together.

    Args:
        stages: those of this rank, by number.
        sharded: the same ones, where state is sharded.
        comm: all ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, Replicated],
        sharded: Mapping[int, ShardedStage],
        comm: Communicator,
    ) -> None:
        self.stages, self._sharded, self._comm = stages, sharded, comm
        # by number, because ranks that share several stages must have them in one order
        self._reducer = Reducer(stages[number] for number in sorted(stages, reverse=True))

    def begin(self) -> None:
        """At the beginning of a step."""
        self._reducer.follow()

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Before each backward of a stage; gradients are averaged once, with the last of a step."""
        if stage in self._sharded:
            self._sharded[stage].before_backward(is_last)
        elif is_last:
            self._reducer.last_backward(self.stages[stage].module)

    def average(self) -> None:
        """Average those that backward has added up in all ranks that hold a stage."""
        for sharded in self._sharded.values():
            sharded.check_gradients()
        self._reducer.reduce()

    def unscale(self, scale: float) -> bool:
        """Divide all by `scale`, unless one is not finite on any rank.

        Returns:
            Whether all are finite, the same on every rank.
        """
        finite = [grad.isfinite().all() for _, grad in self._grads()]
        overflows = sum(1 for one in finite if not one)
        if float(self._comm.all_reduce(torch.tensor([overflows], dtype=torch.float64))) > 0:
            return False
        for _, grad in self._grads():
            grad.div_(scale)
        return True

    def clip(self, limit: float) -> float:
        """Scale all so that their common norm is at most `limit`.

        As ``torch.nn.utils.clip_grad_norm_`` does it for a whole network.

        Returns:
            The norm as it was, the same on every rank.
        """
        squares = torch.zeros(1, dtype=torch.float64)
        for ranks, grad in self._grads():
            norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
            squares += norm.cpu().square() / ranks
        norm = float(self._comm.all_reduce(squares).sqrt())
        factor = limit / (norm + 1e-6)
        if not factor >= 1:  # nor if it is no number
            for _, grad in self._grads():
                grad.mul_(factor)
        return norm

    def _grads(self) -> Iterator[tuple[int, Tensor]]:
        """How many ranks have the same gradient, and the gradient, or this rank's shard of it."""
        for stage in self.stages.values():
            for parameter in stage.module.parameters():
                if parameter.grad is not None:
                    yield stage.comm.size, shard_of(parameter.grad)
