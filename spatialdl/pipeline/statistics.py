"""BatchNorm's running statistics over data replicas, as one process would have kept them.

Each replica sees its own slices only. One process that accumulates over all slices would update
its running statistics slice by slice. So every replica keeps the statistics of each of its slices,
and at the end of the step all fold in all of them, in the order micro-batch, replica.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spatialdl.comm import check
from spatialdl.comm.tape import replaying
from spatialdl.mesh import Mesh


class ReplicaStatistics:
    """Keeps the statistics of a stage's BatchNorm layers until `fold`.

    Args:
        stage: its layers get hooks.
        mesh: the replicas.
    """

    def __init__(self, stage: nn.Module, mesh: Mesh) -> None:
        self._comm = mesh.data_comm
        self._norms = [
            layer
            for layer in stage.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        self._kept: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in self._norms}
        self._before: dict[_BatchNorm, tuple[float | None, Tensor, Tensor, Tensor]] = {}
        for norm in self._norms:
            norm.register_forward_pre_hook(self._start)
            norm.register_forward_hook(self._keep)

    def _start(self, norm: nn.Module, args: Any) -> None:
        """With momentum 1, fresh buffers receive the statistics of this slice as they are."""
        if not (isinstance(norm, _BatchNorm) and norm.training) or replaying():
            return
        self._before[norm] = norm.momentum, *_buffers(norm)
        norm.momentum = 1.0
        # swapped, not overwritten: autograd has kept the old ones for the slices before
        norm.running_mean, norm.running_var, norm.num_batches_tracked = map(
            torch.zeros_like, _buffers(norm)
        )

    def _keep(self, norm: nn.Module, args: Any, output: Any) -> None:
        if not (isinstance(norm, _BatchNorm) and norm in self._before) or replaying():
            return
        mean, variance, _ = _buffers(norm)
        self._kept[norm].append(torch.cat([mean, variance]).double())
        (norm.momentum, norm.running_mean, norm.running_var, norm.num_batches_tracked) = (
            self._before.pop(norm)
        )

    @torch.no_grad()
    def fold(self, slices: list[bool]) -> None:
        """Fold in the statistics of all replicas; all of them must call it.

        Args:
            slices: per micro-batch, whether this replica had samples in it.
        """
        for norm in self._norms:
            kept, self._kept[norm] = self._kept[norm], []
            for statistics in self._ordered(norm, kept, slices):
                _update(norm, statistics)

    def _ordered(self, norm: _BatchNorm, kept: list[Tensor], slices: list[bool]) -> list[Tensor]:
        """The statistics of all slices of all replicas, by micro-batch, then by replica."""
        calls = len(kept) // max(sum(slices), 1)  # a layer may be called twice in a forward
        own = torch.tensor([calls if used else 0 for used in slices], dtype=torch.int64)
        check.agree(self._comm, f"batch_norm statistics of {len(slices)} micro-batches")
        counts = self._comm.all_gather(own)
        per_replica = self._gathered(norm, kept, counts.sum(1).tolist())
        ordered: list[Tensor] = []
        for microbatch in range(len(slices)):
            for replica, queue in enumerate(per_replica):
                for _ in range(int(counts[replica, microbatch])):
                    ordered.append(queue.pop(0))
        return ordered

    def _gathered(
        self, norm: _BatchNorm, kept: list[Tensor], counts: list[int]
    ) -> list[list[Tensor]]:
        """What each replica has kept; rows beyond its count are only there to fill up."""
        rows = torch.zeros(max(counts), 2 * norm.num_features, dtype=torch.float64)
        if kept:
            rows[: len(kept)] = torch.stack(kept)
        everybody = self._comm.all_gather(rows)
        return [list(part[:count]) for part, count in zip(everybody, counts, strict=True)]


def _buffers(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or count is None:
        raise RuntimeError(f"{norm} lost its running statistics during training")
    return mean, variance, count


def _update(norm: _BatchNorm, statistics: Tensor) -> None:
    mean, variance, count = _buffers(norm)
    count.add_(1)
    factor = 1.0 / int(count) if norm.momentum is None else norm.momentum
    for running, value in zip((mean, variance), statistics.chunk(2), strict=True):
        running.mul_(1 - factor).add_(value.to(running), alpha=factor)
