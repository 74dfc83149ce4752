"""The first transport: MPI, by mpi4py.

Tensors travel straight from and into where they lie, described by datatypes, unless packing turns
out to be faster here, see `comm.ways`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.communicator import Pending, UnderWay
from spatialdl.comm.datatypes import buffer, reduction_type
from spatialdl.comm.gpu import StagedExchange, cuda_aware
from spatialdl.comm.held import Exchange
from spatialdl.comm.messages import Messages
from spatialdl.comm.waiting import noted
from spatialdl.comm.ways import WAYS, Neighbours, Way, by_messages, fastest, under_way


class MpiCommunicator(Neighbours):
    """A `Communicator` that is one of mpi4py's too.

    Attributes:
        way: how it makes exchanges, a key of `ways.WAYS`; found out at the first one.
    """

    overlaps = False  # progress is made within calls of MPI, and Allreduce beats Iallreduce
    way: str | None = None

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        everybody = self.Get_group()
        chosen = everybody.Incl(ranks)
        members = [self.world_ranks[rank] for rank in ranks]
        try:
            made = noted("setting up a communicator", members, self.Create_group, chosen)
            return _named(MpiCommunicator(made))
        finally:
            chosen.Free()
            everybody.Free()

    def duplicate(self) -> MpiCommunicator:
        made = noted("setting up a communicator", self.world_ranks, self.Dup)
        return _named(MpiCommunicator(made))

    def barrier(self) -> None:
        noted("barrier", self.world_ranks, super().barrier)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return noted("broadcast", self.world_ranks, super().bcast, obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return noted("gather", self.world_ranks, super().gather, sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        return noted("all-gather", self.world_ranks, super().allgather, sendobj)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return noted("all-reduce", self.world_ranks, super().allreduce, sendobj, op)

    def nodes(self) -> list[int]:
        machine = self.Split_type(MPI.COMM_TYPE_SHARED)
        first = machine.bcast(self.rank)
        machine.Free()
        return self.allgather(first)

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.to("cpu", copy=True).contiguous()
        self.all_reduce_(total)
        return total.to(values.device)

    def all_reduce_(self, values: Tensor) -> None:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        noted("all-reduce", self.world_ranks, self.Allreduce, MPI.IN_PLACE, spec, MPI.SUM)

    def start_all_reduce(self, values: Tensor) -> Pending:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        return Messages([under_way(self.Iallreduce(MPI.IN_PLACE, spec, MPI.SUM))], keep=values)

    def home(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.cpu().contiguous()
        everybody = own.new_empty((self.size, *own.shape))
        noted("all-gather", self.world_ranks, self.Allgather, buffer(own), buffer(everybody))
        return everybody.to(values.device)

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        device = exchange.device
        if device.type == "cpu":
            return self._way(exchange)(self, exchange)
        if exchange.route is None and noted(
            "test of CUDA-aware MPI", self.world_ranks, cuda_aware, self, device
        ):
            return StagedExchange(exchange, partial(by_messages, self), on_device=True)
        return StagedExchange(exchange, self.start_exchange, on_device=False)

    def _way(self, exchange: Exchange) -> Way:
        if exchange.route is not None:
            return by_messages
        if self.way is None:
            self.way = noted("timing of exchanges", self.world_ranks, fastest, self, exchange)
        return WAYS[self.way]


def _named(comm: MpiCommunicator) -> MpiCommunicator:
    check.name_group(comm)
    return comm
