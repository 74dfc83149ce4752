"""The second transport: torch.distributed, gloo for tensors on the host, NCCL for those on a GPU.

The same plans as over MPI. Views are packed, because both backends take contiguous tensors only.
Point-to-point messages with tags (hand-overs) always go by gloo: NCCL knows no tags, and its
messages in opposite directions wait for each other.
"""

from __future__ import annotations

import atexit
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from spatialdl.comm.communicator import Pending, Sending, fold
from spatialdl.comm.gpu import StagedExchange
from spatialdl.comm.held import Held, pieces_of, views_of
from spatialdl.comm.plan import Plan

_open: WeakSet[TorchCommunicator] = WeakSet()


class TorchCommunicator:
    """A `Communicator` over a process group of its own.

    Groups get their names from how many a process has made before, so all ranks must make theirs
    in the same order; a group of one rank is made too.

    Args:
        ranks: of the world, in the order in which they are numbered here.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self._world_ranks = tuple(ranks)
        in_group = sorted(ranks)  # as torch.distributed numbers them
        self._place = [in_group.index(rank) for rank in ranks]
        self._has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self._group = dist.new_group(
            in_group,
            backend="cpu:gloo,cuda:nccl" if self._has_nccl else "gloo",
            use_local_synchronization=True,
        )
        if self._has_nccl:  # connect all ranks now: an exchange may need only some of them
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._group)
        _open.add(self)

    @classmethod
    def world(cls) -> TorchCommunicator:
        """All ranks, once torch.distributed is initialised; all must call it."""
        return cls(range(dist.get_world_size()))

    def split(self, color: int, key: int) -> TorchCommunicator:
        everybody = enumerate(self.allgather((color, key)))
        chosen = sorted((k, rank) for rank, (c, k) in everybody if c == color)
        return TorchCommunicator([self._world_ranks[rank] for _, rank in chosen])

    def duplicate(self) -> TorchCommunicator:
        return TorchCommunicator(self._world_ranks)

    def close(self) -> None:
        """End the group and its threads; nothing can be sent after that."""
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        with suppress(ValueError):  # the program may have ended it and begun anew
            dist.destroy_process_group(group)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def bcast(self, obj: Any, root: int = 0, /) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, group=self._group, group_src=self._place[root])
        return objects[0]

    def gather(self, obj: Any, root: int = 0, /) -> list[Any] | None:
        objects = self.allgather(obj)
        return objects if self.rank == root else None

    def allgather(self, obj: Any, /) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, obj, group=self._group)
        return [found[place] for place in self._place]

    def allreduce(self, obj: Any, /, op: Any = operator.add) -> Any:
        return fold(self.allgather(obj), op)

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        total = self.home(total)
        self.all_reduce_(total)
        return total.to(values.device)

    def all_reduce_(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self._group)

    def start_all_reduce(self, values: Tensor) -> Pending:
        return _Works([dist.all_reduce(values, group=self._group, async_op=True)])

    def home(self, tensor: Tensor) -> Tensor:
        return tensor if self._takes(tensor) else tensor.cpu()

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" or (self._has_nccl and tensor.is_cuda)

    def all_gather(self, values: Tensor) -> Tensor:
        own = self.home(values).contiguous()
        everybody = own.new_empty((self.size, *own.shape))
        rows = [everybody[self._place.index(place)] for place in range(self.size)]
        dist.all_gather(rows, own, group=self._group)
        return everybody.to(values.device)

    def start_exchange(
        self,
        plan: Plan,
        sends: Sequence[Held],
        receives: Sequence[Held],
        adjoint: bool,
        device: torch.device,
    ) -> Pending:
        if device.type == "cpu" or self._has_nccl:
            return self._start_packed(plan, sends, receives, adjoint)

        def talk(outgoing: Sequence[Held], incoming: Sequence[Held]) -> None:
            self._start_packed(plan, outgoing, incoming, adjoint).wait()

        return StagedExchange(plan, sends, receives, adjoint, talk, device, on_device=False)

    def _start_packed(
        self, plan: Plan, sends: Sequence[Held], receives: Sequence[Held], adjoint: bool
    ) -> Pending:
        outgoing, incoming = pieces_of(plan, adjoint)
        views = views_of(incoming, receives)
        landed = [_room_for(view) for view in views]
        operations = [
            self._operation(dist.irecv, room, piece.peer)
            for room, piece in zip(landed, incoming, strict=True)
        ] + [
            self._operation(dist.isend, view.contiguous(), piece.peer)
            for view, piece in zip(views_of(outgoing, sends), outgoing, strict=True)
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        arrivals = [
            (view, room) for view, room in zip(views, landed, strict=True) if room is not view
        ]
        return _Works(works, arrivals, operations)

    def _operation(self, kind: Any, buffer: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, buffer, group=self._group, group_peer=self._place[peer])

    def start_send(self, view: Tensor, rank: int, tag: int) -> Sending:
        packed = view.cpu().contiguous()
        work = dist.isend(packed, group=self._group, group_dst=self._place[rank], tag=tag)
        return _Works([work], keep=packed)

    def receive(self, view: Tensor, rank: int, tag: int) -> None:
        direct = view.device.type == "cpu" and view.is_contiguous()
        landed = view if direct else torch.empty(view.shape, dtype=view.dtype)
        dist.recv(landed, group=self._group, group_src=self._place[rank], tag=tag)
        if landed is not view:
            view.copy_(landed)


@atexit.register
def _close_all() -> None:
    """End all threads of gloo while Python is still whole.

    Such a thread frees the tensors of its last message whenever it is scheduled, and one that does
    so while the interpreter is being taken down ends the process: "terminate called without an
    active exception".
    """
    for communicator in list(_open):
        communicator.close()


def _room_for(view: Tensor) -> Tensor:
    """The view itself if a message can land in it, else a buffer."""
    if view.is_contiguous():
        return view
    return torch.empty(view.shape, dtype=view.dtype, device=view.device)


class _Works:
    """Works of torch.distributed, what to unpack after them, and buffers that must outlive them."""

    def __init__(
        self,
        works: Sequence[Any],
        arrivals: Sequence[tuple[Tensor, Tensor]] = (),
        keep: object = None,
    ) -> None:
        self._works, self._arrivals, self._keep = works, arrivals, keep

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for view, landed in self._arrivals:
            view.copy_(landed)
        self._works, self._arrivals, self._keep = (), (), None

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)
