"""A process group of torch.distributed over an MPI communicator.

PyTorch calls the methods by name, from Python and partly from C++. Names changed in 2.13; both are
defined here. Unlike gloo and NCCL this is not a `Backend` inside a `ProcessGroup`, but the group
itself, the only form that PyTorch supports in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.backend import collectives
from spatialdl.comm.backend.calls import Call, Group, Job, seconds
from spatialdl.comm.backend.communication_thread import CommunicationThread
from spatialdl.comm.backend.host import device_kinds, queued_before, wait_in_stream
from spatialdl.comm.backend.messages import GroupMessages, MessageWork
from spatialdl.torch_internals import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
)

NAME = "mpi4py"
Tensors = Sequence[Tensor]

_Group: Any = ProcessGroup  # its stubs lack the constructor's arguments


class MpiProcessGroup(_Group):  # type: ignore[misc]
    """Process group over a communicator, which is freed with the group.

    Args:
        comm: used by this group only.
        store: store of the group.
        name: given by torch.distributed.
        ranks: world ranks, in the order of the communicator.
        timeout: default after which an operation aborts the job.
        on_close: called when the group is shut down.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        store: Any,
        name: str,
        ranks: Sequence[int],
        timeout: timedelta,
        on_close: Callable[[MpiProcessGroup], None],
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._store = store
        self._communicator, self._name, self._description = comm, name, name
        self._rank, self._size = comm.rank, comm.size
        self._group = Group(name, ranks, ranks[comm.rank])
        self._timeout_s = timeout.total_seconds()
        self._thread = CommunicationThread(f"mpi4py group {name}")
        self._messages = GroupMessages(lambda: self._comm)
        self._on_close = on_close
        self._open = True

    # interface of torch.distributed

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description
        if description != "undefined":
            self._group = self._group._replace(title=description)

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return list(map(torch.device, device_kinds()))

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """No-op: calls are numbered from 0 on all ranks."""

    def __repr__(self) -> str:
        return f"MpiProcessGroup(rank {self.rank()} of {self.size()}, '{self._name}')"

    def shutdown(self) -> None:
        """Complete pending operations and free the communicator; collective."""
        if self._open:
            self.drain()
            self._open = False
            self._on_close(self)
            self._communicator.Free()

    def drain(self) -> None:
        """Block until all started operations are complete."""
        self._thread.close()
        self._messages.close()

    def abort(self) -> None:
        """Forget the group without waiting for pending operations."""
        if self._open:
            self._open = False
            self._on_close(self)

    # collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts or AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts or AllreduceCoalescedOptions())

    def _all_reduce(self, tensors: Tensors, opts: Any) -> Work:
        op = opts.reduceOp
        job = collectives.all_reduce(self._comm, tensors, op)
        return self._do("all_reduce", tensors, tensors, job, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        tensors = [tensors[opts.rootTensor]] if opts.rootTensor else tensors
        job = collectives.broadcast(self._comm, tensors, opts.rootRank)
        return self._do("broadcast", tensors, tensors, job, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        op, root = opts.reduceOp, opts.rootRank
        jobs = [collectives.reduce(self._comm, tensor, root, op) for tensor in tensors]
        return self._do("reduce", tensors, tensors, collectives.all_of(jobs), opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        jobs = [
            collectives.all_gather(self._comm, into, tensor)
            for into, tensor in zip(outputs, inputs, strict=True)
        ]
        results = [tensor for into in outputs for tensor in into]
        return self._do("all_gather", inputs, results, collectives.all_of(jobs), opts)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        jobs = [
            collectives.all_gather_single(self._comm, output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        job = jobs[0] if len(jobs) == 1 else collectives.all_of(jobs)
        return self._do("all_gather_into_tensor", inputs, outputs, job, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        gathered = outputs[0] if outputs else []
        job = collectives.gather(self._comm, gathered, inputs[0], opts.rootRank)
        return self._do("gather", inputs, gathered, job, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        scattered = inputs[0] if inputs else []
        job = collectives.scatter(self._comm, outputs[0], scattered, opts.rootRank)
        return self._do("scatter", outputs, outputs, job, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        opts = opts or ReduceScatterOptions()
        op = opts.reduceOp
        jobs = [
            collectives.reduce_scatter(self._comm, output, tensors, op)
            for output, tensors in zip(outputs, inputs, strict=True)
        ]
        flat = [tensor for tensors in inputs for tensor in tensors]
        return self._do("reduce_scatter", flat, outputs, collectives.all_of(jobs), opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        op = opts.reduceOp
        jobs = [
            collectives.reduce_scatter_single(self._comm, output, tensor, op)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        job = jobs[0] if len(jobs) == 1 else collectives.all_of(jobs)
        return self._do("reduce_scatter_tensor", inputs, outputs, job, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: Sequence[int],
        rows: Sequence[int],
        opts: Any = None,
    ) -> Work:
        job = collectives.all_to_all_single(
            self._comm, output, tensor, output_rows or [], rows or []
        )
        opts = opts or AllToAllOptions()
        return self._do("all_to_all_single", [tensor], [output], job, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        job = collectives.all_to_all(self._comm, outputs, inputs)
        return self._do("all_to_all", inputs, outputs, job, opts or AllToAllOptions())

    def barrier(self, opts: Any = None) -> Work:
        job = collectives.barrier(self._comm)
        return self._do("barrier", (), (), job, opts or BarrierOptions())

    def _do(self, name: str, tensors: Tensors, results: Tensors, job: Job, opts: Any) -> Work:
        """Run a collective, or start it if it is asynchronous."""
        call = Call(self._group, name, tensors, seconds(opts.timeout, self._timeout_s), opts)
        if before := queued_before(results):
            job = _after(before, job)
        if opts.asyncOp:
            job = collectives.when_all_are_here(self._comm, job)
            return self._thread.start(call, job, results)
        return self._thread.run(call, job)

    @property
    def _comm(self) -> MPI.Intracomm:
        """The communicator, if it is open.

        Raises:
            RuntimeError: otherwise.
        """
        if not self._open:
            raise RuntimeError(f"{self._group} was destroyed; create a new one")
        return self._communicator

    # messages

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        call = self._message("send", tensors, f" to rank {self._group.ranks[rank]}, tag {tag}")
        return self._messages.send(call, tensor, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        call = self._message("recv", tensors, f" from rank {self._group.ranks[rank]}, tag {tag}")
        return self._messages.receive(call, tensor, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        call = self._message("recv", tensors, f" from any rank, tag {tag}")
        return self._messages.receive(call, tensor, None, tag)

    def _message(self, name: str, tensors: Tensors, words: str) -> Call:
        return Call(self._group, name, tensors, self._timeout_s, words=words)


def _after(events: Sequence[torch.Event], job: Job) -> Job:
    """A job that first waits for device events, because it writes to device tensors."""

    def ordered() -> None:
        wait_in_stream(events)
        job()

    return ordered
