"""The first transport: MPI, by mpi4py.

Views travel straight from and into where they lie, described by datatypes; one neighbourhood
collective moves all messages of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.communicator import Pending, peers_of
from spatialdl.comm.datatypes import buffer, mpi_type, reduction_type
from spatialdl.comm.gpu import StagedExchange, cuda_aware
from spatialdl.comm.plan import Plan


class MpiCommunicator(MPI.Intracomm):
    """A `Communicator` that is one of mpi4py's too."""

    def split(self, color: int, key: int) -> MpiCommunicator:
        return MpiCommunicator(self.Split(color, key))

    def duplicate(self) -> MpiCommunicator:
        return MpiCommunicator(self.Dup())

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.to("cpu", copy=True).contiguous()
        spec = [buffer(total), total.numel(), reduction_type(total)]
        self.Allreduce(MPI.IN_PLACE, spec, MPI.SUM)
        return total.to(values.device)

    def start_all_reduce(self, values: Tensor) -> Pending:
        spec = [buffer(values), values.numel(), reduction_type(values)]
        return _Request(self.Iallreduce(MPI.IN_PLACE, spec, MPI.SUM), values)

    def home(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.cpu().contiguous()
        everybody = own.new_empty((self.size, *own.shape))
        self.Allgather(buffer(own), buffer(everybody))
        return everybody.to(values.device)

    def start_exchange(
        self,
        plan: Plan,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        adjoint: bool,
        device: torch.device,
    ) -> Pending:
        if device.type == "cpu":
            return self._start_on_host(plan, sends, receives, adjoint)

        def talk(outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
            self._start_on_host(plan, outgoing, incoming, adjoint).wait()

        return StagedExchange(sends, receives, talk, device, on_device=cuda_aware(self, device))

    def _start_on_host(
        self, plan: Plan, sends: Sequence[Tensor], receives: Sequence[Tensor], adjoint: bool
    ) -> Pending:
        graph = self._graph(plan, adjoint)
        request = graph.Ineighbor_alltoallw(_message(sends), _message(receives))
        return _Request(request, (sends, receives))

    def start_send(self, view: Tensor, rank: int, tag: int) -> Pending:
        view = view.cpu()
        return _Request(self.Isend(_span(view), rank, tag), view)

    def receive(self, view: Tensor, rank: int, tag: int) -> None:
        landed = view if view.device.type == "cpu" else torch.empty_like(view, device="cpu")
        self.Recv(_span(landed), rank, tag)
        if landed is not view:
            view.copy_(landed)

    @cached_property
    def _graphs(self) -> dict[tuple[bytes, bool], MPI.Distgraphcomm]:
        return {}

    def _graph(self, plan: Plan, adjoint: bool) -> MPI.Distgraphcomm:
        """The communicator in which a rank's neighbours are the plan's peers.

        One per set of neighbours, because MPI libraries have few contexts to give away. Whether
        one must be made follows from the whole plan, so all ranks make it together.
        """
        key = (plan.graph, adjoint)
        if key not in self._graphs:
            sources, targets = peers_of(plan, adjoint)
            self._graphs[key] = self.Create_dist_graph_adjacent(sources, targets)
        return self._graphs[key]


class _Request:
    """An MPI request, and the buffers that must outlive it."""

    def __init__(self, request: MPI.Request, keep: object) -> None:
        self._request, self._keep = request, keep

    def wait(self) -> None:
        self._request.Wait()
        self._keep = None


def _message(views: Sequence[Tensor]) -> list[object]:
    return [
        MPI.BOTTOM,
        [1] * len(views),
        [view.data_ptr() for view in views],
        [mpi_type(view) for view in views],
    ]


def _span(view: Tensor) -> list[object]:
    """A strided view as a message: the memory from its first to its last element."""
    if view.numel() == 0:
        return [MPI.buffer.fromaddress(view.data_ptr(), 0), 0, MPI.BYTE]
    last = sum(
        (count - 1) * stride for count, stride in zip(view.shape, view.stride(), strict=True)
    )
    span = MPI.buffer.fromaddress(view.data_ptr(), (last + 1) * view.element_size())
    return [span, 1, mpi_type(view)]
