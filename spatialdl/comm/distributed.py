"""Transport over torch.distributed with gloo; for tensors on accelerators see `device_path`.

Uses the same plans as MPI. Views are packed, because gloo requires contiguous tensors.
"""

from __future__ import annotations

import atexit
import pickle
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from spatialdl.comm import check
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Message, Messages, Pending, UnderWay
from spatialdl.comm.device_transport import HostAndDevice
from spatialdl.comm.processes import machine
from spatialdl.comm.single_process import Completed
from spatialdl.comm.waiting import noted, timeout_of_groups
from spatialdl.torch_internals import default_store, group_names, naming_groups

_open: WeakSet[TorchCommunicator] = WeakSet()
_made: Counter[tuple[int, ...]] = Counter()


class TorchCommunicator(HostAndDevice):
    """A `Communicator` over a separate process group, whose threads and sockets end with it.

    Args:
        ranks: world ranks, in the order of their numbers here. All of them must create
            communicators of these ranks in the same order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self.world_ranks = tuple(ranks)
        self._gloo: Any = _gloo_group(self.world_ranks)
        self._to_self = _ToSelf()
        _open.add(self)
        check.name_group(self)

    @classmethod
    def world(cls) -> TorchCommunicator:
        """All ranks of torch.distributed, which must be initialised; collective."""
        return cls(range(dist.get_world_size()))

    def subset(self, ranks: Sequence[int]) -> TorchCommunicator:
        return TorchCommunicator([self.world_ranks[rank] for rank in ranks])

    def duplicate(self) -> TorchCommunicator:
        return TorchCommunicator(self.world_ranks)

    def nodes(self) -> list[int]:
        names = self.allgather(machine())
        return [names.index(name) for name in names]

    def close(self) -> None:
        """End the threads of gloo; the communicator cannot be used afterwards."""
        self._gloo = None

    def barrier(self) -> None:
        noted("barrier", None, self.all_reduce, torch.zeros(1))

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        return noted("broadcast", self.world_ranks, self._bcast, obj, root)

    def _bcast(self, obj: Any, root: int) -> Any:
        packed = _packed(obj) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(packed)])
        dist.broadcast(size, group=self._gloo, group_src=root)
        if self.rank != root:
            packed = packed.new_empty(int(size))
        dist.broadcast(packed, group=self._gloo, group_src=root)
        return obj if self.rank == root else _unpacked(packed)

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        objects = noted("gather", None, self.allgather, obj)
        return objects if self.rank == root else None

    def allgather(self, obj: Any, /) -> list[Any]:
        packed = _packed(obj)
        sizes = self.all_gather(torch.tensor([len(packed)])).view(-1).tolist()
        padded = packed.new_zeros(max(sizes))
        padded[: len(packed)] = packed
        rows = self.all_gather(padded)
        return [_unpacked(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def start_host_sum(self, values: Tensor) -> Pending:
        return Messages([_under_way(dist.all_reduce(values, group=self._gloo, async_op=True))])

    def gather_into(self, gathered: Tensor, own: Tensor) -> None:
        """Fill (ranks, ...) on the host with the contiguous tensors of all ranks."""
        noted("all-gather", self.world_ranks, dist.all_gather, list(gathered), own, self._gloo)

    def start_host_exchange(self, exchange: Exchange) -> UnderWay:
        ranks, tag = exchange.route or (range(self.size), 0)
        views, incoming, outgoing = exchange.landing(), exchange.incoming, exchange.outgoing
        buffers = [_receive_buffer(view) for view in views]
        leaving = [view.contiguous() for view in exchange.leaving()]
        to_receive = [(x, ranks[piece.peer]) for x, piece in zip(buffers, incoming, strict=True)]
        to_send = [(x, ranks[piece.peer]) for x, piece in zip(leaving, outgoing, strict=True)]
        arrivals = [
            (view, room) for view, room in zip(views, buffers, strict=True) if room is not view
        ]
        return Messages(self._under_way(to_receive, to_send, tag), arrivals, (buffers, leaving))

    def _under_way(
        self, receives: Sequence[tuple[Tensor, int]], sends: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Message]:
        """Start receives and sends of contiguous tensors, in the order of the peers' plans."""
        return [self._receive(room, peer, tag) for room, peer in receives] + [
            self._send(packed, peer, tag) for packed, peer in sends
        ]

    def _receive(self, room: Tensor, peer: int, tag: int) -> Message:
        if peer == self.rank:
            return self._to_self.receive(room, tag)
        return _under_way(dist.irecv(room, group=self._gloo, group_src=peer, tag=tag), peer)

    def _send(self, packed: Tensor, peer: int, tag: int) -> Message:
        if peer == self.rank:
            return self._to_self.send(packed, tag)
        return _under_way(dist.isend(packed, group=self._gloo, group_dst=peer, tag=tag), peer)


class _ToSelf:
    """Messages of a rank to itself, which gloo rejects; matched in order for each tag."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._counts: Counter[tuple[str, int]] = Counter()

    def send(self, packed: Tensor, tag: int) -> Message:
        self._sent[self._next("send", tag)] = packed.clone()
        return Completed().wait, Completed().is_done, None

    def receive(self, room: Tensor, tag: int) -> Message:
        """The matching send must precede its wait."""
        key = self._next("receive", tag)
        return lambda: room.copy_(self._sent.pop(key)), lambda: key in self._sent, None

    def _next(self, kind: str, tag: int) -> tuple[int, int]:
        self._counts[kind, tag] += 1
        return tag, self._counts[kind, tag]


@atexit.register
def _close_all() -> None:
    """End all threads of gloo before the interpreter shuts down.

    Such a thread frees the tensors of its last message at an arbitrary time. If that happens during
    interpreter shutdown, the process ends with "terminate called without an active exception".
    """
    for communicator in list(_open):
        communicator.close()


def _gloo_group(ranks: tuple[int, ...]) -> Any:
    """Create a group that torch.distributed does not register.

    ``dist.new_group`` names a group by the number of groups. If garbage collection removes one
    earlier on one rank than on another, later names differ or clash.
    """
    store = PrefixStore(f"spatialdl/{'-'.join(map(str, ranks))}/{_made[ranks]}", default_store())
    _made[ranks] += 1
    here = ranks.index(dist.get_rank())
    limit = timeout_of_groups() or dist.default_pg_timeout
    return noted(
        "creation of a communicator", ranks, dist.ProcessGroupGloo, store, here, len(ranks), limit
    )


def local_group(ranks: Sequence[int], backend: str) -> Any:
    """Create a group registered with torch.distributed; collective over exactly these ranks."""
    with _named_by_its_ranks():
        return dist.new_group(
            list(ranks),
            timeout=timeout_of_groups(),
            backend=backend,
            use_local_synchronization=True,
        )


def _named_by_its_ranks() -> AbstractContextManager[None]:
    """Name new groups by their ranks, and by the number of groups of the same ranks.

    PyTorch names a group by the number of all groups of its process: ranks with different numbers
    of groups use different names for the same group, and hang.
    """

    def named(ranks: list[int]) -> str:
        prefix = f"spatialdl/{'-'.join(map(str, ranks))}/"
        return f"{prefix}{sum(name.startswith(prefix) for name in group_names())}"

    return naming_groups(named)


def _packed(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpacked(values: Tensor) -> Any:
    return pickle.loads(values.numpy().tobytes())


def _receive_buffer(view: Tensor) -> Tensor:
    """The view itself if it is contiguous, else a buffer."""
    if view.is_contiguous():
        return view
    return torch.empty(view.shape, dtype=view.dtype, device=view.device)


def _under_way(work: Any, peer: int | None = None) -> Message:
    return work.wait, work.is_completed, peer
