"""Gradient reducer: averages over the ranks that hold copies of a parameter, in buckets.

The objective is the mean over the ranks of each rank's loss. Backward computes the gradient of
their sum (the backward of an all-reduce is an all-reduce), so the average over the ranks is correct
for both spatial and data parallelism.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.exchange import start_sum
from spatialdl.comm.reduce import add_over_ranks_, sum_over_ranks
from spatialdl.torch_internals import foreach_copy_

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

NAME = "average_gradients"
BUCKET_BYTES = 2**20
"""Smaller gradients share a message, in a copy; larger ones are sent from their own memory."""


@dataclass(frozen=True)
class Replicated:
    """A module with copies on several ranks, over which its gradients are averaged.

    Attributes:
        module: the same on all ranks of `comm`.
        axes: mesh axes along which its parameters are replicated.
        comm: ranks along these axes.
        copies: number of summed gradients; exceeds the ranks if a rank holds several copies, is
            smaller if some ranks compute none.
        lane: the same ranks, for buckets that overlap with backward; None to send all after it.
    """

    module: nn.Module
    axes: tuple[str, ...]
    comm: Communicator
    copies: int
    lane: Communicator | None = None


def lane_of(comm: Communicator) -> Communicator | None:
    """A lane if the transport overlaps; collective."""
    return comm.duplicate() if comm.size > 1 and comm.overlaps else None


class Reducer:
    """Averages gradients; bitwise equal on all ranks, with and without overlap.

    All ranks send the same buckets in the same order, independent of which are full first: module
    by module, in each the last parameters first. Every `reduce` compares the trained parameters,
    so that the number of messages never depends on the gradients of one rank.

    Args:
        modules: in the same order on ranks that share several of them.

    Attributes:
        trained: parameters found by `follow`.
    """

    def __init__(self, modules: Iterable[Replicated]) -> None:
        self._modules = [one for one in modules if max(one.copies, one.comm.size) > 1]
        self.trained: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._plan: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._next = 0

    def follow(self) -> bool:
        """Hook the backward of parameters that are trained now; call before a forward.

        Returns:
            Whether they differ from the previous ones.
        """
        lanes = [(p, one.lane) for one in self._modules for p in one.module.parameters()]
        trained = [p for p, _ in lanes if p.requires_grad]
        if len(trained) == len(self.trained) and all(map(operator.is_, trained, self.trained)):
            return False
        for handle in self._handles:
            handle.remove()
        self.trained = trained
        self._handles = [
            p.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for p, lane in lanes
            if p.requires_grad and lane is not None
        ]
        return True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.trained = [], []

    def last_backward(self, module: nn.Module) -> None:
        """Announce the last backward of a module: afterwards its gradients are complete."""
        for bucket in self._plan:
            if bucket.of.module is module and bucket.of.lane is not None and not check.enabled():
                bucket.missing = {id(parameter) for parameter in bucket.parameters}

    def _accumulated(self, parameter: Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or bucket.missing is None:
            return
        if bucket.total is not None:
            raise RuntimeError(
                f"a parameter of {tuple(parameter.shape)} gets its gradient in several parts in "
                "one backward, but the first was already sent: set use_reentrant=False for "
                "checkpoints of layers that share weights"
            )
        bucket.missing.discard(id(parameter))
        # in order, because ranks match them by order
        while self._next < len(self._plan) and self._plan[self._next].missing == set():
            self._plan[self._next].send()
            self._next += 1

    @torch.no_grad()
    def reduce(self) -> None:
        """Send the remaining buckets, and wait until all gradients are averaged.

        A parameter without a gradient on every rank keeps none; a gradient missing on some ranks
        counts as zero there. Of DTensors the shards are averaged.

        Raises:
            ValueError: on all ranks, if some of them train a parameter that others do not.
        """
        trained = [(one, _agreed(one)) for one in self._modules]
        new = _planned(
            (one, [p for p in some if id(p) not in self._bucket_of]) for one, some in trained
        )
        todo = [*self._plan, *new]
        for bucket in todo:
            bucket.send()
        for bucket in todo:
            bucket.finish()
        self._next = 0
        if new or len(self._bucket_of) != sum(len(some) for _, some in trained):
            self._plan = _planned(trained)
            self._bucket_of = {id(p): bucket for bucket in self._plan for p in bucket.parameters}


def _agreed(replicated: Replicated) -> list[nn.Parameter]:
    """Trained parameters in reverse order; gradients that only other ranks have are set to zero."""
    named, size = dict(replicated.module.named_parameters()), replicated.comm.size
    flags = [(p.requires_grad, p.requires_grad and p.grad is not None) for p in named.values()]
    own = torch.tensor(flags, dtype=torch.int32)
    counts = sum_over_ranks(replicated.comm, own, "gradients present") if named else own
    for (name, parameter), (trained, present) in zip(named.items(), counts.tolist(), strict=True):
        if 0 < trained < size:
            raise ValueError(
                f"{name} requires a gradient on {trained} of the {size} ranks that hold copies "
                f"(along {', '.join(replicated.axes)}): freeze it on all ranks, or on none"
            )
        if present and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter for parameter in named.values() if parameter.requires_grad][::-1]


class _Bucket:
    """Parameters of a module whose gradients share a message.

    Attributes:
        missing: ids of those without a gradient in the last backward of a step; None before it.
        total: the sent tensor; None before.
    """

    def __init__(self, of: Replicated, parameters: list[nn.Parameter]) -> None:
        self.of, self.parameters = of, parameters
        self.missing: set[int] | None = None
        self.total: Tensor | None = None
        self._grads: list[Tensor] = []
        self._pending: Pending | None = None

    def send(self) -> None:
        """Send unless sent already, or no rank has a gradient; blocks if there is no lane."""
        grads = [p.grad if p.requires_grad else None for p in self.parameters]
        if self.total is not None or all(grad is None for grad in grads):
            return
        self._grads = [
            shard_of(torch.zeros_like(p) if grad is None else grad.detach())
            for p, grad in zip(self.parameters, grads, strict=True)
        ]
        comm = self.of.lane or self.of.comm
        self.total = _joined(self._grads)
        if self.of.lane is None:
            add_over_ranks_(comm, self.total, NAME)
            self.finish()
        else:
            self._pending = start_sum(comm, self.total, NAME)

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        if self.total is not None:
            _split(self.total.div_(self.of.copies), self._grads)
        self.missing = self.total = self._pending = None


def _planned(trained: Iterable[tuple[Replicated, list[nn.Parameter]]]) -> list[_Bucket]:
    return [_Bucket(one, part) for one, some in trained for part in buckets(some, BUCKET_BYTES)]


def average_(tensors: Iterable[Tensor], comm: Communicator, copies: int) -> None:
    """Average tensors over ranks in place; collective, with the same tensors on all ranks."""
    for some in buckets(tensors, BUCKET_BYTES):
        total = _joined(some)
        add_over_ranks_(comm, total, NAME)
        _split(total.div_(copies), some)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype to sum, half precision in float32; a single one in place."""
    parts = [
        (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one).reshape(-1)
        for one in tensors
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _split(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the result of `_joined` back to the tensors."""
    joined = torch.view_as_complex(joined.view(-1, 2)) if tensors[0].is_complex() else joined
    parts = torch.split(joined, [one.numel() for one in tensors])
    shaped = [(one, part.view_as(one)) for one, part in zip(tensors, parts, strict=True)]
    elsewhere = [pair for pair in shaped if pair[0].data_ptr() != pair[1].data_ptr()]
    if joined.is_complex():  # _foreach_copy_ rejects lazily conjugated gradients
        for one, part in elsewhere:
            one.copy_(part)
    elif elsewhere:
        foreach_copy_([one for one, _ in elsewhere], [part for _, part in elsewhere])


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, as a view; any other tensor unchanged."""
    dtensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and seldom needed
    if dtensors is None or not isinstance(tensor, dtensors.DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def buckets(tensors: Iterable[AnyTensor], limit: int) -> list[list[AnyTensor]]:
    """Group tensors of one dtype and device into buckets of about `limit` bytes, by last tensor.

    Larger tensors get a bucket each.
    """
    full: list[list[AnyTensor]] = []
    filling: dict[Any, list[AnyTensor]] = {}
    sizes: Counter[Any] = Counter()
    for tensor in tensors:
        size, kind = shard_of(tensor).nbytes, (tensor.dtype, tensor.device)
        if size >= limit:
            full.append([tensor])
            continue
        filling.setdefault(kind, []).append(tensor)
        sizes[kind] += size
        if sizes[kind] >= limit:
            full.append(filling.pop(kind))
            sizes[kind] = 0
    return [*full, *filling.values()]
