"""The first transport: MPI, by mpi4py.

Tensors travel straight from and into where they lie, described by datatypes, unless packing turns
out to be faster here, see `comm.ways`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.communicator import Pending, Sending
from spatialdl.comm.datatypes import buffer, mpi_type, reduction_type
from spatialdl.comm.gpu import StagedExchange, cuda_aware
from spatialdl.comm.held import Held
from spatialdl.comm.neighbours import Neighbours
from spatialdl.comm.plan import Plan
from spatialdl.comm.waiting import noted
from spatialdl.comm.ways import WAYS, Request, Requests, Way, by_messages, fastest


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
        return Request(self.Iallreduce(MPI.IN_PLACE, spec, MPI.SUM), values)

    def home(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.cpu().contiguous()
        everybody = own.new_empty((self.size, *own.shape))
        noted("all-gather", self.world_ranks, self.Allgather, buffer(own), buffer(everybody))
        return everybody.to(values.device)

    def start_exchange(
        self,
        plan: Plan,
        sends: Sequence[Held],
        receives: Sequence[Held],
        adjoint: bool,
        device: torch.device,
    ) -> Pending:
        if device.type == "cpu":
            start = self._fastest_way(plan, sends, receives, adjoint)
            return start(self, plan, sends, receives, adjoint)

        aware = noted("test of CUDA-aware MPI", self.world_ranks, cuda_aware, self, device)

        def talk(outgoing: Sequence[Held], incoming: Sequence[Held]) -> None:
            start = by_messages if aware else self._fastest_way(plan, outgoing, incoming, adjoint)
            start(self, plan, outgoing, incoming, adjoint).wait()

        return StagedExchange(plan, sends, receives, adjoint, talk, device, on_device=aware)

    def _fastest_way(
        self, plan: Plan, sends: Sequence[Held], receives: Sequence[Held], adjoint: bool
    ) -> Way:
        if self.way is None:
            timing = (self, plan, sends, receives, adjoint)
            self.way = noted("timing of exchanges", self.world_ranks, fastest, *timing)
        return WAYS[self.way]

    def start_send(self, view: Tensor, rank: int, tag: int) -> Sending:
        view = view.cpu()
        return Request(self.Isend(_span(view), rank, tag), view)

    def start_receive(self, view: Tensor, rank: int, tag: int) -> Pending:
        landed = view if view.device.type == "cpu" else torch.empty_like(view, device="cpu")
        request = self.Irecv(_span(landed), rank, tag)
        return Requests([request], landed, [] if landed is view else [(view, landed)])


def _named(comm: MpiCommunicator) -> MpiCommunicator:
    check.name_group(comm)
    return comm


def _span(view: Tensor) -> list[object]:
    """A strided view as a message: the memory from its first to its last element."""
    if view.numel() == 0:
        return [MPI.buffer.fromaddress(view.data_ptr(), 0), 0, MPI.BYTE]
    last = sum(
        (count - 1) * stride for count, stride in zip(view.shape, view.stride(), strict=True)
    )
    span = MPI.buffer.fromaddress(view.data_ptr(), (last + 1) * view.element_size())
    return [span, 1, mpi_type(view)]
