"""The ranks that hold a stage, and the gradients that they average, unscale and clip."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer, Replicated, shard_of
from spatialdl.comm.mesh import Mesh
from spatialdl.layout.placement import Placement
from spatialdl.torch_internals import foreach_div_, foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from spatialdl.pipeline.sharded import ShardedStage


_CPU = torch.device("cpu")


class Gradients:
    """Gradients of a pipeline; its methods are collective over all ranks.

    Args:
        stages: those of this rank, by number.
        sharded: the same stages where state is sharded.
        comm: all ranks.
        device: of the stages.
        channels: by stage, the number of ranks that divide the channels of its weights.
        divided: ids of the divided parameters; other parameters are whole on each of these ranks.
        criterion: the loss on all ranks, if it has parameters; they are averaged only.
    """

    def __init__(
        self,
        stages: Mapping[int, Replicated],
        sharded: Mapping[int, ShardedStage],
        comm: Communicator,
        device: torch.device = _CPU,
        channels: Mapping[int, int] = MappingProxyType({}),
        divided: Collection[int] = (),
        criterion: Replicated | None = None,
    ) -> None:
        self.stages, self._sharded, self._comm = stages, sharded, comm
        self._device, self._channels, self._divided = device, channels, divided
        # in number order, so that ranks that share several stages reduce them in the same order
        self._reducer = Reducer(stages[number] for number in sorted(stages, reverse=True))
        self._criterion = criterion
        self._of_criterion = Reducer([criterion]) if criterion else None

    def begin(self) -> None:
        """Drop the gradients of the last step, and prepare for the next one."""
        for one in (*self.stages.values(), self._criterion):
            if one is not None:
                one.module.zero_grad()
        self._reducer.follow()

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Prepare for a backward of a stage; the last one of a step averages gradients."""
        if stage in self._sharded:
            self._sharded[stage].before_backward(is_last)
        elif is_last:
            self._reducer.last_backward(self.stages[stage].module)

    def average(self) -> None:
        """Average the accumulated gradients over all ranks that hold a stage, or the criterion."""
        for sharded in self._sharded.values():
            sharded.check_gradients()
        self._reducer.reduce()
        if self._of_criterion is not None:
            self._of_criterion.reduce()

    def unscale(self, scale: float) -> bool:
        """Divide all gradients by `scale` if all are finite on every rank.

        Synchronizes host and device once.

        Returns:
            Whether all are finite, the same on every rank.
        """
        grads = [grad for of_stage in self._by_stage() for grad in of_stage]
        overflows = not bool(norms(grads, math.inf).isfinite().all())
        if float(self._comm.all_reduce(torch.tensor([overflows], dtype=torch.float64))) > 0:
            return False
        if grads:
            foreach_div_(grads, scale)
        return True

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their total norm is at most `limit`.

        Matches ``torch.nn.utils.clip_grad_norm_`` on the whole network.

        Returns:
            The norm before clipping, float64 (), the same on every rank.
        """
        norm = self._squares().sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type == "cpu" and factor >= 1:  # on a device the check would synchronize
            return norm
        for grads in self._by_stage():
            if grads:
                foreach_mul_(grads, factor)
        return norm

    def _squares(self) -> Tensor:
        """Sum of squares of all gradients of the network, each counted once.

        Reduced even where every rank has all of them: CPU types may round norms differently, and
        weights must stay identical.
        """
        own = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, stage in self.stages.items():
            parts: list[Tensor] = []
            wholes: list[Tensor] = []
            for p in stage.module.parameters():
                if p.grad is not None:
                    (parts if id(p) in self._divided else wholes).append(shard_of(p.grad))
            for grads, copies in ((parts, 1), (wholes, self._channels.get(number, 1))):
                if grads:
                    squares = norms(grads, 2, torch.float64).square().sum()
                    own += squares / (stage.comm.size * copies)
        return self._comm.all_reduce(own.view(1))[0]

    def _by_stage(self) -> list[list[Tensor]]:
        """Gradients of each stage, or this rank's shards of them."""
        return [
            [shard_of(p.grad) for p in stage.module.parameters() if p.grad is not None]
            for stage in self.stages.values()
        ]


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> Tensor:
    """Norm of each non-empty tensor, in few kernels."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    return torch.stack(foreach_norm(nonempty, order, dtype)) if nonempty else torch.zeros(0)


def stage_ranks(placement: Placement, stage: int, tensor: int = 0) -> list[int]:
    """Ranks of the world that hold the same part of a stage.

    Args:
        tensor: index of the channel part.
    """
    return sorted(
        {
            rank
            for copy in range(placement.copies)
            for replica in range(placement.data)
            for rank in placement.ranks(stage, replica, copy, tensor)
        }
    )


def stage_groups(
    placement: Placement, meshes: Mapping[int, Mesh], comm: Communicator
) -> dict[int, Communicator]:
    """Communicators of the ranks that hold each of this rank's stages; collective.

    Args:
        meshes: by the stages of this rank.
        comm: all ranks of the placement.
    """
    if placement.copies == 1:
        return {stage: mesh.comm for stage, mesh in meshes.items()}
    # by number, so that ranks with several stages create these in the same order
    return {
        stage: comm.subset(stage_ranks(placement, stage, meshes[stage].channels))
        for stage in sorted(meshes)
    }
