"""Updates BatchNorm's running statistics as a single process would, over all replicas.

Each replica has its own slices of a batch only. A single process that accumulates over all slices
updates running statistics slice by slice: in forward, and once more in backward where
``torch.utils.checkpoint`` reruns a layer. Updates are linear, so after K slices each has its own
weight in the result. Every rank keeps the statistics of its slices, and their weighted sum is
reduced over all ranks at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import sum_over_ranks
from spatialdl.comm.replay import replaying
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.torch_internals import (
    BatchNormBase,
    current_graph_task_id,
    foreach_add_,
    foreach_copy_,
    top_saved_tensors_hooks,
)


class _Kept(NamedTuple):
    """Mean and variance (2 * features,) of one call of a layer, float64."""

    slice: int
    statistics: Tensor


class SliceStatistics:
    """Collects the statistics of a stage's BatchNorm layers by slice until `fold`.

    Args:
        stage: its layers get hooks.
        comm: the ranks that have this stage.
        in_order: whether this rank runs all forwards, in the order of the slices; then only layers
            that a checkpoint may rerun in backward are handled.
    """

    def __init__(self, stage: nn.Module, comm: Communicator, in_order: bool = False) -> None:
        self._comm, self._in_order = comm, in_order
        self._direct: set[BatchNormBase] = set()  # layers that update their own statistics
        self._hooks: object = None  # on saved tensors, outside of the stage
        self._norms = [
            layer
            for layer in stage.modules()
            if isinstance(layer, BatchNormBase)
            and is_plain(layer)
            and layer.running_mean is not None
        ]
        self._slice, self._counts, self._has_backward = 0, True, True
        self._kept: dict[BatchNormBase, list[_Kept]] = {norm: [] for norm in self._norms}
        self._before: dict[BatchNormBase, tuple[float | None, Tensor, Tensor, Tensor]] = {}
        for norm in self._norms:
            norm.register_forward_pre_hook(self._start)
            # a checkpoint ends its second run by an exception out of the last layer
            norm.register_forward_hook(self._keep, always_call=True)

    @property
    def modules(self) -> list[BatchNormBase]:
        """The layers whose statistics are kept."""
        return self._norms

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Context of the calls for one slice of the batch.

        Args:
            number: of the slice, from 0 in the order of a single process.
            counts: True on exactly one of the ranks that share the slice.
        """
        self._slice, self._counts = number, counts
        self._has_backward = torch.is_grad_enabled()
        self._hooks = top_saved_tensors_hooks(False)
        yield

    def _start(self, norm: nn.Module, args: Any) -> None:
        """Set momentum 1 and fresh buffers, which receive the unweighted statistics of a slice."""
        if not (isinstance(norm, BatchNormBase) and norm.training) or replaying():
            return
        if self._in_order and not (self._has_backward and self._may_run_again(norm)):
            return
        self._before[norm] = norm.momentum, *_buffers(norm)
        norm.momentum = 1.0
        # swapped, not overwritten: autograd saved the old ones for earlier slices
        norm.running_mean, norm.running_var, norm.num_batches_tracked = map(
            torch.zeros_like, _buffers(norm)
        )

    def _keep(self, norm: nn.Module, args: Any, output: Any) -> None:
        if not (isinstance(norm, BatchNormBase) and norm in self._before) or replaying():
            return
        mean, variance, _ = _buffers(norm)
        if self._counts:
            self._kept[norm].append(_Kept(self._slice, torch.cat([mean, variance]).double()))
        (norm.momentum, norm.running_mean, norm.running_var, norm.num_batches_tracked) = (
            self._before.pop(norm)
        )

    def _may_run_again(self, norm: BatchNormBase) -> bool:
        """Whether backward reruns a call, or is doing so.

        A checkpoint sets hooks on saved tensors, or disables gradients.
        """
        is_inside = top_saved_tensors_hooks(False) != self._hooks or not torch.is_grad_enabled()
        if not is_inside and current_graph_task_id() == -1:
            self._direct.add(norm)
            return False
        if norm in self._direct:
            raise UnsupportedSpatialOp(
                f"a {type(norm).__name__} is called both inside and outside of "
                "torch.utils.checkpoint, and micro-batches would update its running statistics in "
                "another order than a single process: take parallel.microbatches=1, or two layers"
            )
        return True

    @torch.no_grad()
    def fold(self, slices: int, evaluates: bool = False) -> None:
        """Fold in the statistics of all slices of the batch; collective.

        Args:
            evaluates: whether only layers that stay in training mode have kept any.
        """
        if evaluates and not any(norm.training for norm in self._norms):
            self._check_none_kept()
            return
        if not self._norms:
            return
        own = torch.zeros(len(self._norms), slices, dtype=torch.int64)
        for row, norm in zip(own, self._norms, strict=True):
            for kept in self._kept[norm]:
                row[kept.slice] += 1
        calls = sum_over_ranks(self._comm, own, "calls of batch_norm").tolist()
        parts = [self._own_part(norm, row) for norm, row in zip(self._norms, calls, strict=True)]
        total = sum_over_ranks(self._comm, torch.cat(parts), "batch_norm statistics")
        values = torch.split(total, [len(part) for part in parts])
        # layers with the same remaining weight, usually all, in few kernels
        alike: dict[object, list[int]] = {}
        for number, (norm, row) in enumerate(zip(self._norms, calls, strict=True)):
            key = norm if norm.momentum is None else (norm.momentum, sum(row))
            alike.setdefault(key, []).append(number)
        for norms in alike.values():
            updates, parts = sum(calls[norms[0]]), [values[n] for n in norms]
            if updates:
                _add([self._norms[n] for n in norms], updates, torch.cat(parts))
        foreach_add_([_buffers(norm)[2] for norm in self._norms], [sum(r) for r in calls])

    def _check_none_kept(self) -> None:
        layer = next((norm for norm, kept in self._kept.items() if kept), None)
        if layer is not None:
            raise UnsupportedSpatialOp(
                f"a {type(layer).__name__} is in training mode within the forward of an evaluation "
                "only: let it stay in training mode, or use F.batch_norm with training=True"
            )

    def _own_part(self, norm: BatchNormBase, calls: list[int]) -> Tensor:
        """Contribution of this rank's slices to the layer's statistics."""
        kept, self._kept[norm] = self._kept[norm], []
        weights = _weights(norm, sum(calls))
        places = [0, *accumulate(calls)]  # of each slice's first call among all calls
        total = _buffers(norm)[0].new_zeros(2 * len(_buffers(norm)[0]), dtype=torch.float64)
        for slice_number, statistics in kept:
            total.add_(statistics, alpha=weights[places[slice_number]])
            places[slice_number] += 1
        return total


def is_plain(norm: BatchNormBase) -> bool:
    """Whether the forward is PyTorch's own or timm's; `pipeline.forward_state` handles others."""
    forward = type(norm).forward
    own = (BatchNormBase.forward, nn.SyncBatchNorm.forward)
    is_timm = forward.__module__ == "timm.layers.norm_act"
    return (forward in own or is_timm) and "forward" not in vars(norm)


def _buffers(norm: BatchNormBase) -> tuple[Tensor, Tensor, Tensor]:
    # not by attribute access: where channels are divided, forwards see those of the whole shape
    names = ("running_mean", "running_var", "num_batches_tracked")
    mean, variance, count = (norm._buffers[name] for name in names)
    if mean is None or variance is None or count is None:
        raise RuntimeError(f"{norm} lost its running statistics during training")
    return mean, variance, count


def _add(norms: Sequence[BatchNormBase], updates: int, values: Tensor) -> None:
    """Apply updates of the running statistics of some layers with the same momentum.

    Args:
        norms: one layer if its momentum is None, which averages over all updates so far.
        updates: number of updates.
        values: means and variances of each layer, float64, times `_weights`.
    """
    running = [buffer for norm in norms for buffer in _buffers(norm)[:2]]
    updated, momentum = torch.cat(running).double(), norms[0].momentum
    if momentum is None:  # the count stays on the device, as reading it would synchronize
        before = _buffers(norms[0])[2]
        updated.mul_(before).add_(values).div_(before + updates)
    else:
        updated.mul_((1.0 - momentum) ** updates).add_(values)
    foreach_copy_(running, torch.split(updated, [len(buffer) for buffer in running]))


def _weights(norm: BatchNormBase, updates: int) -> list[float]:
    """Weight of each update in the result; for cumulative averages, before the division."""
    if norm.momentum is None:
        return [1.0] * updates
    return [norm.momentum * (1.0 - norm.momentum) ** after for after in reversed(range(updates))]
