"""Transport over MPI, by mpi4py.

Tensors are sent from and received into their own memory, described by datatypes, unless packing
measures faster here, see `comm.exchange_strategies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Messages, Pending, UnderWay, fold
from spatialdl.comm.device_path import current_device, device_path
from spatialdl.comm.device_transport import ByGroup, DeviceAware, DeviceTransport, ThroughHost
from spatialdl.comm.exchange_strategies import (
    STRATEGIES,
    Neighbours,
    Strategy,
    buffer,
    by_messages,
    fastest,
    reduction_type,
    under_way,
)
from spatialdl.comm.waiting import noted


class MpiCommunicator(Neighbours):
    """A `Communicator` that is also an mpi4py communicator.

    Attributes:
        strategy: exchange strategy, a key of `STRATEGIES`; measured at the first exchange.
    """

    strategy: str | None = None

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        group = self.Get_group()
        chosen = group.Incl(ranks)
        members = [self.world_ranks[rank] for rank in ranks]
        try:
            made = noted("creation of a communicator", members, self.Create_group, chosen)
            return _named(MpiCommunicator(made))
        finally:
            chosen.Free()
            group.Free()

    def duplicate(self) -> MpiCommunicator:
        made = noted("creation of a communicator", self.world_ranks, self.Dup)
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
        """Uses all-gather: mpi4py's own all-reduce blocks other threads of this process."""
        return fold(noted("all-reduce", self.world_ranks, super().allgather, sendobj), op)

    def nodes(self) -> list[int]:
        machine = self.Split_type(MPI.COMM_TYPE_SHARED)
        first = machine.bcast(self.rank)
        machine.Free()
        return self.allgather(first)

    @property
    def overlaps(self) -> bool:  # progress is made within calls of MPI; Allreduce beats Iallreduce
        return device_path().name == "nccl"

    @cached_property
    def _on_device(self) -> DeviceTransport:
        """Device transport; the first access is collective."""
        path = device_path()
        if path.name == "mpi":
            messages = partial(by_messages, self)
            return DeviceAware(self, self._add, self.gather_into, messages)
        if path.name == "nccl":
            return ByGroup(self, path, current_device(), ThroughHost(self))
        return ThroughHost(self)

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        self.all_reduce_(total)
        return total

    def all_reduce_(self, values: Tensor) -> None:
        if values.device.type == "cpu":
            self._add(values)
        else:
            noted("all-reduce", self.world_ranks, self.start_all_reduce(values).wait)

    def _add(self, values: Tensor) -> None:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        noted("all-reduce", self.world_ranks, self.Allreduce, MPI.IN_PLACE, spec, MPI.SUM)

    def start_all_reduce(self, values: Tensor) -> Pending:
        if values.device.type != "cpu":
            return self._on_device.start_all_reduce(values)
        spec = [buffer(values), values.numel(), reduction_type(values)]
        return Messages([under_way(self.Iallreduce(MPI.IN_PLACE, spec, MPI.SUM))], keep=values)

    def all_gather(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return noted("all-gather", self.world_ranks, self._on_device.all_gather, values)
        own = values.contiguous()
        gathered = own.new_empty((self.size, *own.shape))
        self.gather_into(gathered, own)
        return gathered

    def gather_into(self, gathered: Tensor, own: Tensor) -> None:
        """Fill (ranks, ...) with the contiguous tensors of all ranks; MPI must reach the memory."""
        noted("all-gather", self.world_ranks, self.Allgather, buffer(own), buffer(gathered))

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        if exchange.device.type != "cpu":
            return self._on_device.start_exchange(exchange)
        return self._strategy(exchange)(self, exchange)

    def _strategy(self, exchange: Exchange) -> Strategy:
        if exchange.route is not None:
            return by_messages
        if self.strategy is None:
            self.strategy = noted("timing of exchanges", self.world_ranks, fastest, self, exchange)
        return STRATEGIES[self.strategy]


def _named(comm: MpiCommunicator) -> MpiCommunicator:
    check.name_group(comm)
    return comm
