"""The first transport: MPI, by mpi4py.

Tensors travel straight from and into where they lie, described by datatypes, unless packing turns
out to be faster here, see `comm.ways`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.communicator import Pending, Sending
from spatialdl.comm.datatypes import buffer, mpi_type, reduction_type
from spatialdl.comm.gpu import StagedExchange, cuda_aware
from spatialdl.comm.held import Held, pieces_of
from spatialdl.comm.plan import Plan
from spatialdl.comm.ways import WAYS, Request, Requests, Way, by_messages, fastest
from spatialdl.waiting import noted


class MpiCommunicator(MPI.Intracomm):
    """A `Communicator` that is one of mpi4py's too.

    Attributes:
        way: how it makes exchanges, a key of `ways.WAYS`; found out at the first one.
    """

    way: str | None = None

    @cached_property
    def world_ranks(self) -> tuple[int, ...]:
        here, world = self.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = here.Translate_ranks(range(here.size), world)
        here.Free()
        world.Free()
        return tuple(ranks)

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        everybody = self.Get_group()
        chosen = everybody.Incl(ranks)
        members = [self.world_ranks[rank] for rank in ranks]
        try:
            made = noted("setting up a communicator", members, self.Create_group, chosen)
            return MpiCommunicator(made)
        finally:
            chosen.Free()
            everybody.Free()

    def duplicate(self) -> MpiCommunicator:
        made = noted("setting up a communicator", self.world_ranks, self.Dup)
        return MpiCommunicator(made)

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

    @cached_property
    def _graphs(self) -> dict[tuple[bytes, bool], MPI.Distgraphcomm]:
        return {}

    def graph(self, plan: Plan, adjoint: bool) -> MPI.Distgraphcomm:
        """The communicator in which a rank's neighbours are the plan's peers.

        One per set of neighbours, because MPI libraries have few contexts to give away. Whether
        one must be made follows from the whole plan, so all ranks make it together.
        """
        key = (plan.graph, adjoint)
        if key not in self._graphs:
            sends, receives = pieces_of(plan, adjoint)
            sources, targets = [p.peer for p in receives], [p.peer for p in sends]
            make = self.Create_dist_graph_adjacent
            self._graphs[key] = noted("setting up", self.world_ranks, make, sources, targets)
        return self._graphs[key]


def _span(view: Tensor) -> list[object]:
    """A strided view as a message: the memory from its first to its last element."""
    if view.numel() == 0:
        return [MPI.buffer.fromaddress(view.data_ptr(), 0), 0, MPI.BYTE]
    last = sum(
        (count - 1) * stride for count, stride in zip(view.shape, view.stride(), strict=True)
    )
    span = MPI.buffer.fromaddress(view.data_ptr(), (last + 1) * view.element_size())
    return [span, 1, mpi_type(view)]
