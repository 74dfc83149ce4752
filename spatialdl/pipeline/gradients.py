"""Gradients of the stages that a rank holds: averaged, unscaled, clipped."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer, Replicated, shard_of

if TYPE_CHECKING:
    from spatialdl.pipeline.sharded import ShardedStage

_CPU = torch.device("cpu")


class Gradients:
    """Those of a pipeline; all its ranks call it together.

    Args:
        stages: those of this rank, by number.
        sharded: the same ones, where state is sharded.
        comm: all ranks.
        device: of the stages.
        channels: by stage over how many ranks it divides the channels of its weights.
        divided: the parameters that are, by their ids; the others are whole on each of these ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, Replicated],
        sharded: Mapping[int, ShardedStage],
        comm: Communicator,
        device: torch.device = _CPU,
        channels: Mapping[int, int] = MappingProxyType({}),
        divided: Collection[int] = (),
    ) -> None:
        self.stages, self._sharded, self._comm = stages, sharded, comm
        self._device, self._channels, self._divided = device, channels, divided
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

        The host waits for the device once.

        Returns:
            Whether all are finite, the same on every rank.
        """
        grads = [grad for of_stage in self._by_stage() for grad in of_stage]
        overflows = not bool(norms(grads, math.inf).isfinite().all())
        if float(self._comm.all_reduce(torch.tensor([overflows], dtype=torch.float64))) > 0:
            return False
        if grads:
            torch._foreach_div_(grads, scale)
        return True

    def clip(self, limit: float) -> Tensor:
        """Scale all so that their common norm is at most `limit`.

        As ``torch.nn.utils.clip_grad_norm_`` does it for a whole network.

        Returns:
            The norm as it was, float64 (), the same on every rank.
        """
        norm = self._squares().sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type == "cpu" and factor >= 1:  # on a device it is not asked for
            return norm
        for grads in self._by_stage():
            if grads:
                torch._foreach_mul_(grads, factor)
        return norm

    def _squares(self) -> Tensor:
        """The sum of the squares of all gradients of the network, each counted once.

        Over ranks also where each has all of them: different CPUs may round norms differently, and
        weights must stay the same.
        """
        own = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, stage in self.stages.items():
            parts: list[Tensor] = []
            wholes: list[Tensor] = []
            for p in stage.module.parameters():
                if p.grad is not None:
                    (parts if id(p) in self._divided else wholes).append(shard_of(p.grad))
            own += _sum_of_squares(parts) / stage.comm.size
            own += _sum_of_squares(wholes) / (stage.comm.size * self._channels.get(number, 1))
        return self._comm.all_reduce(own.view(1))[0]

    def _by_stage(self) -> list[list[Tensor]]:
        """The gradients of each stage, or this rank's shards of them."""
        return [
            [shard_of(p.grad) for p in stage.module.parameters() if p.grad is not None]
            for stage in self.stages.values()
        ]


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return norms(tensors, 2, torch.float64).square().sum()


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> Tensor:
    """A norm of each tensor that is not empty, in few kernels."""
    some = [one for one in tensors if one.numel()]
    return torch.stack(torch._foreach_norm(some, order, dtype)) if some else torch.zeros(0)
