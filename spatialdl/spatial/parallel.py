"""A network's gradients averaged over the ranks of a mesh: after backward, or while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator, Pending
from spatialdl.comm.gradients import average, buckets
from spatialdl.mesh import Mesh
from spatialdl.waiting import noted

BUCKET_BYTES = 8 * 2**20


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Average the gradients of all parameters over all ranks of the mesh, after backward.

    Every rank must call it. A parameter without a gradient on every rank keeps none; without one
    on some ranks only, it counts as zero there. What is clipped or looked at is right afterwards.

    Args:
        model: the network, the same on every rank.
        mesh: the ranks: those of the grid and of all data replicas.
    """
    average(model.parameters(), mesh.comm, mesh.size)


class SpatialParallel(nn.Module):
    """A network whose gradients are averaged over the ranks of a mesh, overlapped with backward.

    After ``loss.backward()`` they are what `spatialdl.average_gradients` would have made of them.
    Parameters travel in buckets, the last layers first, always in the same order on all ranks.
    The state dict has the network's own names.

    Every rank must run backward the same number of times. Gradients that are accumulated over
    several backwards are averaged after each, which gives the same sum.

    Args:
        module: the network, with the same weights on every rank.
        mesh: the ranks.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.module = module
        self._mesh = mesh
        self._comm = mesh.comm.duplicate()
        trained = [p for p in module.parameters() if p.requires_grad]
        self._buckets = [_Bucket(part) for part in buckets(trained[::-1], BUCKET_BYTES)]
        self._next = 0
        self._running = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The network's own, without a prefix."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the network itself."""
        return self.module.load_state_dict(*args, **kwargs)

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
            noted("gradients", self._comm.world_ranks, bucket.finish, self._mesh.size)
        self._next, self._running = 0, False


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
        self._pending = comm.start_all_reduce(self._flat)

    @torch.no_grad()
    def finish(self, ranks: int) -> None:
        if self._pending is None or self._flat is None:
            return
        self._pending.wait()
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
