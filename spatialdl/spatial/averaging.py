"""Gradients of a network averaged over ranks while its backward runs."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.gradients import buckets
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import add_over_ranks_, sum_over_ranks
from spatialdl.comm.waiting import noted
from spatialdl.spatial.agreed import note_averaged

BUCKET_BYTES = 8 * 2**20


class Averaging:
    """Averages what backward adds to parameters, and what ``torch.autograd.grad`` returns.

    Args:
        mesh: the ranks.
        comm: the same ranks, for these messages only.
    """

    def __init__(self, mesh: Mesh, comm: Communicator) -> None:
        self._mesh, self._comm = mesh, comm
        self._trained: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._running = False
        self._returned: dict[int, Tensor] = {}
        self._task = -1
        self._returns = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Averaging:
        """For a copy of the network, over the same ranks; makes no communicator."""
        return Averaging(self._mesh, self._comm)

    def follow(self, module: nn.Module) -> None:
        """Average the gradients of all parameters of `module` that are trained now.

        Raises:
            RuntimeError: if an error has ended the last backward.
        """
        if self._running:
            if torch._C._current_graph_task_id() == -1:
                raise RuntimeError(
                    "an error ended the last backward before its gradients were averaged, and "
                    "ranks have sent different numbers of them: start the program again"
                )
            return
        trained = [p for p in module.parameters() if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained)):
            return
        for handle in self._handles:
            handle.remove()
        self._trained = trained
        self._handles = []
        for number, p in enumerate(trained):
            self._handles += [
                p.register_post_accumulate_grad_hook(self._arrived),  # type: ignore[no-untyped-call]
                p.register_hook(partial(self._seen, number)),  # type: ignore[no-untyped-call]
            ]
        self._buckets = [_Bucket(part) for part in buckets(trained[::-1], BUCKET_BYTES)]

    # --- backward

    def _arrived(self, parameter: Tensor) -> None:
        if not self._running:
            self._running = True
            for bucket in self._buckets:
                bucket.missing = {id(p) for p in bucket.parameters}
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        for bucket in self._buckets:
            bucket.missing.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start_next()

    def _start_next(self) -> None:
        # in order, whichever bucket was ready first: ranks must not mix them up
        self._buckets[self._next].start(self._comm)
        self._next += 1

    def _finish(self) -> None:
        """At the end of backward: send what had no gradient on this rank, wait for all."""
        while self._next < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            ranks = self._comm.world_ranks
            noted("gradients", ranks, bucket.finish, self._comm, self._mesh.size)
        self._next, self._running = 0, False
        note_averaged(self._trained)
        if self._mesh.agreement is not None:
            self._mesh.agreement.weights(self._trained)

    # --- torch.autograd.grad

    def _seen(self, number: int, grad: Tensor) -> Tensor | None:
        """A gradient before it is accumulated, or returned: then it is averaged at the end."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._returns = task, _is_returned(self._trained[number])
            self._returned = {}
        if not self._returns:
            return None
        if not self._returned:
            torch.autograd.Variable._execution_engine.queue_callback(self._average_returned)
        self._returned[number] = grad.clone()
        return self._returned[number]

    @torch.no_grad()
    def _average_returned(self) -> None:
        returned, self._returned = self._returned, {}
        here = torch.tensor([n in returned for n in range(len(self._trained))], dtype=torch.int32)
        counts = sum_over_ranks(self._comm, here, "gradients returned")
        if bool(((counts > 0) & (counts < self._comm.size)).any()):
            raise RuntimeError(
                "torch.autograd.grad has gradients of some parameters on some ranks only, which "
                "cannot be averaged: call backward(), which counts a missing gradient as zero"
            )
        for bucket in buckets([returned[n] for n in sorted(returned)], BUCKET_BYTES):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            add_over_ranks_(self._comm, flat, "gradients returned")
            parts = torch.split(flat.div_(self._mesh.size), [grad.numel() for grad in bucket])
            for grad, part in zip(bucket, parts, strict=True):
                grad.copy_(part.view_as(grad))


def _is_returned(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs now returns the gradient of a leaf (``autograd.grad``)."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which is how PyTorch says so
        return True
    return False


class _Bucket:
    """Parameters whose gradients travel together, with a flag each for whether there is one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[int] = set()
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def start(self, comm: Communicator) -> None:
        like = self.parameters[0]
        present = [parameter.grad is not None for parameter in self.parameters]
        parts = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.parameters
        ]
        flags = torch.tensor(present, dtype=like.dtype, device=like.device)
        flat = comm.home(torch.cat([*parts, flags]).detach())
        self._flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        check.agree(comm, f"gradients over ranks, {flat.dtype}, {flat.numel()} values")
        self._pending = comm.start_all_reduce(self._flat)

    @torch.no_grad()
    def finish(self, comm: Communicator, ranks: int) -> None:
        if self._pending is None or self._flat is None:
            return
        check.understood(comm, self._pending.wait)
        sizes = [parameter.numel() for parameter in self.parameters]
        *sums, flags = torch.split(self._flat, [*sizes, len(sizes)])
        for parameter, total, present in zip(self.parameters, sums, flags, strict=True):
            if present > 0:
                mean = (total / ranks).view_as(parameter).to(parameter)
                if parameter.grad is None:
                    parameter.grad = mean
                else:
                    parameter.grad.copy_(mean)
        self._pending = self._flat = None
