"""Collectives that are queued on the simulated accelerator, as NCCL's are on a GPU.

The host never waits in them: each runs in a stream of its own group, after what the current stream
had queued when it was called, and ``wait()`` has the current stream wait for it. What moves the
bytes is gloo, in the thread of that stream. Every address is looked at: memory of the host, or of
another device, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

NAME = "simccl"


def register() -> None:
    """Make it PyTorch's backend for the device."""
    dist.Backend.register_backend(NAME, SimGroup, devices=["sim"])


class SimGroup(dist.ProcessGroup):
    """Ranks with a device each."""

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        self._stream = torch.Stream("sim")
        self._batch: list[tuple[str, Tensor, int]] | None = None
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        views = [self._view(x) for x in tensors]
        return self._queued(lambda: self._gloo.allreduce(views).wait(), tensors)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        views = [self._view(x) for x in tensors]
        return self._queued(lambda: self._gloo.broadcast(views, options).wait(), tensors)

    def allgather(
        self, everybody: Sequence[Sequence[Tensor]], own: Sequence[Tensor], options: Any = None
    ) -> Any:
        rows = [[self._view(x) for x in into] for into in everybody]
        views = [self._view(x) for x in own]
        return self._queued(
            lambda: self._gloo.allgather(rows, views).wait(), [*own, *chain(*everybody)]
        )

    def _allgather_base(self, everybody: Tensor, own: Tensor, options: Any = None) -> Any:
        into, view = self._view(everybody), self._view(own)
        rows = list(into.view(self.size(), -1))
        return self._queued(
            lambda: self._gloo.allgather([rows], [view.view(-1)]).wait(), [everybody, own]
        )

    def _reduce_scatter_base(self, own: Tensor, everybody: Tensor, options: Any) -> Any:
        if options.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"only sums are known here, not {options.reduceOp}")
        into, view = self._view(own), self._view(everybody)

        def add() -> None:
            total = view.clone()
            self._gloo.allreduce([total]).wait()
            into.copy_(total.view(self.size(), -1)[self.rank()].view_as(into))

        return self._queued(add, [own, everybody])

    # what PyTorch calls them from 2.13 on
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> None:
        assert self._batch is not None
        self._batch += [("send", x, to) for x in tensors]

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> None:
        assert self._batch is not None
        self._batch += [("recv", x, source) for x in tensors]

    def _end_coalescing(self, device: torch.device) -> Any:
        batch, self._batch = self._batch or [], None
        todo = [(kind, self._view(x), peer) for kind, x, peer in batch]

        def move() -> None:
            works = [getattr(self._gloo, kind)([view], peer, 0) for kind, view, peer in todo]
            for work in works:
                work.wait()

        return self._queued(move, [x for _, x, _ in batch])

    def _view(self, x: Tensor) -> Tensor:
        kind = torch.sim.pointer_kind(x.data_ptr())
        if kind != f"device {torch.sim.current_device()}":
            raise RuntimeError(f"a collective was given memory of: {kind}")
        if not x.is_contiguous():
            raise RuntimeError("a collective was given a tensor that is not contiguous")
        return torch.sim.host_view(x)

    def _queued(self, do: Callable[[], object], keep: Sequence[Tensor]) -> _Work:
        self._stream.wait_stream(torch.sim.current_stream())
        torch.sim.enqueue(do, self._stream)
        return _Work(self._stream, keep)


class _Work(Work):
    """Something queued; its tensors are kept until somebody waits for it, as NCCL's are."""

    def __init__(self, stream: torch.Stream, keep: Sequence[Tensor]) -> None:
        super().__init__()
        self._done, self._keep = stream.record_event(), list(keep)
        self._future = torch.futures.Future(devices=[torch.device("sim", stream.device_index)])
        with stream:  # whoever waits for it waits for what is queued there
            self._future.set_result(list(keep))

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.sim.current_stream().wait_event(self._done)
        self._keep = []
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future
