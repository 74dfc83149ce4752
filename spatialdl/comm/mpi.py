"""Transport over MPI, by mpi4py.

Tensors are sent from and received into their own memory, described by datatypes, unless packing
measures faster here, see `comm.exchange_strategies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Messages, Pending, UnderWay
from spatialdl.comm.device_path import device_path
from spatialdl.comm.device_transport import DeviceAware, DeviceTransport, HostAndDevice
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


class MpiCommunicator(HostAndDevice, Neighbours):
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

    def nodes(self) -> list[int]:
        machine = self.Split_type(MPI.COMM_TYPE_SHARED)
        first = machine.bcast(self.rank)
        machine.Free()
        return self.allgather(first)

    def _device_transport(self) -> DeviceTransport:
        if device_path().name == "mpi":
            messages = partial(by_messages, self)
            return DeviceAware(self, self._add, self.gather_into, messages)
        return super()._device_transport()

    def all_reduce_(self, values: Tensor) -> None:
        if values.device.type == "cpu":  # faster than Iallreduce
            self._add(values)
        else:
            super().all_reduce_(values)

    def _add(self, values: Tensor) -> None:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        noted("all-reduce", self.world_ranks, self.Allreduce, MPI.IN_PLACE, spec, MPI.SUM)

    def start_host_sum(self, values: Tensor) -> Pending:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        return Messages([under_way(self.Iallreduce(MPI.IN_PLACE, spec, MPI.SUM))], keep=values)

    def gather_into(self, gathered: Tensor, own: Tensor) -> None:
        """Fill (ranks, ...) with the contiguous tensors of all ranks; MPI must reach the memory."""
        noted("all-gather", self.world_ranks, self.Allgather, buffer(own), buffer(gathered))

    def start_host_exchange(self, exchange: Exchange) -> UnderWay:
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
