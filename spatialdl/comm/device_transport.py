"""Transports of accelerator tensors over the paths of `comm.device_path`.

The host synchronises with the device only where a host library must read or write its results:
once for each message or sum, never on ``nccl``. Packing and unpacking run on a separate
high-priority stream, so that queued work of the network continues.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import (
    Communicator,
    Message,
    Messages,
    Pending,
    Start,
    UnderWay,
    fold,
)
from spatialdl.comm.device_path import DevicePath, current_device, device_group, device_path
from spatialdl.comm.plan import Piece
from spatialdl.comm.single_process import Completed
from spatialdl.comm.waiting import noted, timeout_of_groups


class DeviceTransport(Protocol):
    """Transport of a `Communicator` for accelerator tensors; sums need contiguous tensors."""

    def start_all_reduce(self, values: Tensor) -> Pending: ...

    def all_gather(self, values: Tensor) -> Tensor: ...

    def start_exchange(self, exchange: Exchange) -> UnderWay: ...


class HostAndDevice:
    """Base of communicators that move host tensors themselves, and accelerator tensors otherwise.

    The path of accelerator tensors is that of `comm.device_path`.
    """

    rank: int
    size: int
    world_ranks: tuple[int, ...]

    if TYPE_CHECKING:  # mpi4py has it

        def allgather(self, obj: Any, /) -> list[Any]: ...

    def start_host_sum(self, values: Tensor) -> Pending:
        """Start to sum a contiguous host tensor in place."""
        raise NotImplementedError

    def gather_into(self, gathered: Tensor, own: Tensor) -> None:
        """Fill (ranks, ...) on the host with the contiguous tensors of all ranks."""
        raise NotImplementedError

    def start_host_exchange(self, exchange: Exchange) -> UnderWay:
        """Start an exchange of host tensors."""
        raise NotImplementedError

    def allreduce(self, obj: Any, /, op: Any = operator.add) -> Any:
        """By all-gather: mpi4py's own all-reduce blocks other threads of this process."""
        return fold(self.allgather(obj), op)

    @property
    def overlaps(self) -> bool:
        """Only on NCCL: gloo's threads compete for cores; MPI makes progress within its calls."""
        return device_path().name == "nccl"

    @cached_property
    def _on_device(self) -> DeviceTransport:
        """Device transport; the first access is collective."""
        return self._device_transport()

    def _device_transport(self) -> DeviceTransport:
        path = device_path()
        if path.name == "nccl":
            return ByGroup(self, path, current_device(), ThroughHost(self))
        return ThroughHost(self)

    def all_reduce(self, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        self.all_reduce_(total)
        return total

    def all_reduce_(self, values: Tensor) -> None:
        noted("all-reduce", self.world_ranks, self.start_all_reduce(values).wait)

    def start_all_reduce(self, values: Tensor) -> Pending:
        if values.device.type == "cpu":
            return self.start_host_sum(values)
        return self._on_device.start_all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return noted("all-gather", self.world_ranks, self._on_device.all_gather, values)
        own = values.contiguous()
        gathered = own.new_empty((self.size, *own.shape))
        self.gather_into(gathered, own)
        return gathered

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        if exchange.device.type == "cpu":
            return self.start_host_exchange(exchange)
        return self._on_device.start_exchange(exchange)


class ThroughHost:
    """Through pinned host memory, which PyTorch caches.

    Args:
        comm: moves host tensors.
    """

    def __init__(self, comm: HostAndDevice) -> None:
        self._comm = comm

    def start_all_reduce(self, values: Tensor) -> Pending:
        return _StagedSum(pinned_copy(values), self._comm.all_reduce_, values)

    def all_gather(self, values: Tensor) -> Tensor:
        own, ready = pinned_copy(values)
        gathered = torch.empty((self._comm.size, *own.shape), dtype=own.dtype, pin_memory=True)
        ready.synchronize()
        self._comm.gather_into(gathered, own)
        return gathered.to(values.device, non_blocking=True)

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, self._comm.start_exchange, pinned=True)


class _StagedSum:
    """A sum on the host of a tensor that is being copied there."""

    def __init__(
        self, copy: tuple[Tensor, torch.Event], add: Callable[[Tensor], None], values: Tensor
    ) -> None:
        self._copy, self._add, self._values = copy, add, values

    def wait(self) -> None:
        staged, ready = self._copy
        ready.synchronize()
        self._add(staged)
        self._values.copy_(staged, non_blocking=True)


def pinned_copy(values: Tensor) -> tuple[Tensor, torch.Event]:
    """A copy in pinned memory, and the event of its completion."""
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    staged.copy_(values.contiguous(), non_blocking=True)
    return staged, torch.accelerator.current_stream(values.device).record_event()


class DeviceAware:
    """MPI reads and writes device memory in place, after the device has written it.

    Args:
        add: sums in place.
        gather_into: gathers contiguous memory, given (all ranks, own).
        start: starts messages of contiguous pieces.
    """

    def __init__(
        self,
        comm: Communicator,
        add: Callable[[Tensor], None],
        gather_into: Callable[[Tensor, Tensor], None],
        start: Start,
    ) -> None:
        self._comm, self._add, self._gather_into, self._start = comm, add, gather_into, start

    def start_all_reduce(self, values: Tensor) -> Pending:
        torch.accelerator.current_stream(values.device).synchronize()
        self._add(values)
        return Completed()

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.contiguous()
        gathered = own.new_empty((self._comm.size, *own.shape))
        torch.accelerator.current_stream(values.device).synchronize()
        self._gather_into(gathered, own)
        return gathered

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, self._start)


class ByGroup:
    """NCCL, or PyTorch's equivalent: queued on the device without host synchronisation.

    Messages have no tags: exchanges with a route use `routed` or a `Lane`.

    Args:
        path: has the rendezvous store.
        device: device of this rank.
        routed: moves exchanges with a route.
    """

    def __init__(
        self, comm: HostAndDevice, path: DevicePath, device: torch.device, routed: DeviceTransport
    ) -> None:
        self._size, self._routed = comm.size, routed
        self._place = path, tuple(comm.world_ranks), comm.rank, device

    @cached_property
    def _group(self) -> Any:
        """Device group; the first access is collective, which exchanges with a route are not."""
        return _group(*self._place)

    def start_all_reduce(self, values: Tensor) -> Pending:
        return _Queued(self._group.allreduce([values]), values)

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.contiguous()
        gathered = own.new_empty((self._size, *own.shape))
        self._group._allgather_base(_bytes(gathered), _bytes(own)).wait()
        return gathered

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        if exchange.route is not None:
            return self._routed.start_exchange(exchange)
        return PackedExchange(exchange, partial(_queue, self._group), at_once=True)


class Lane:
    """Messages with a route but without tags: matched in the order in which both sides start them.

    NCCL queues them in one stream, where each waits for its peer. A lane therefore serves one
    direction between sending and receiving ranks; collective over all of them.

    Args:
        comm: contains the ranks.
        ranks: ranks of `comm`, in the order of the plans.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], device: torch.device) -> None:
        self.device, self.rank, self.size = device, comm.rank, comm.size
        self.world_ranks = comm.world_ranks
        chosen = tuple(comm.world_ranks[rank] for rank in ranks)
        self._group = _group(device_path(), chosen, list(ranks).index(comm.rank), device)

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, partial(_queue, self._group), at_once=True)


def _group(path: DevicePath, ranks: tuple[int, ...], rank: int, device: torch.device) -> Any:
    assert path.store is not None
    limit = timeout_of_groups() or dist.default_pg_timeout
    make = (path.store, ranks, rank, device, limit)
    return noted("creation of a device group", ranks, device_group, *make)


def _queue(group: Any, exchange: Exchange) -> UnderWay:
    """Queue all messages of an exchange at once; they start after the work of the stream."""
    incoming = [(x, p.peer) for (x, _), p in _pairs(exchange.receives, exchange.incoming)]
    outgoing = [(x, p.peer) for (x, _), p in _pairs(exchange.sends, exchange.outgoing)]
    if not incoming and not outgoing:
        return Completed()
    group._start_coalescing(exchange.device)
    for tensor, peer in incoming:
        group.recv([_bytes(tensor)], peer, 0)
    for tensor, peer in outgoing:
        group.send([_bytes(tensor)], peer, 0)
    work = group._end_coalescing(exchange.device)
    message: Message = (work.wait, work.is_completed, None)
    return Messages([message], keep=exchange)


def _pairs(held: Sequence[BoxedTensor], pieces: Sequence[Piece]) -> list[tuple[BoxedTensor, Piece]]:
    """Pairs with bytes to move: batches may be empty."""
    return [pair for pair in zip(held, pieces, strict=True) if pair[0].tensor.numel() > 0]


class _Queued:
    """A sum that the current stream waits for."""

    def __init__(self, work: Any, values: Tensor) -> None:
        self._work, self._values = work, values

    def wait(self) -> None:
        self._work.wait()


def _bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, because NCCL supports fewer dtypes."""
    return x.view(-1).view(torch.uint8)


class PackedExchange:
    """A pending exchange of accelerator tensors.

    Its messages start after packing if it has a route, else at `wait`.

    Args:
        start: starts to move contiguous buffers, one for each piece.
        pinned: the buffers are in pinned host memory; else on the device.
        at_once: `start` queues on the device; else it needs packed data, and the host waits.
    """

    def __init__(
        self, exchange: Exchange, start: Start, pinned: bool = False, at_once: bool = False
    ) -> None:
        self._keep: object = exchange  # or its memory would be reused
        self._views, self._pinned, self._at_once = exchange.landing(), pinned, at_once
        self._device, self._stream = exchange.device, side_stream(exchange.device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            outgoing = [
                BoxedTensor(self._packed_copy(view), piece.box)
                for view, piece in zip(exchange.leaving(), exchange.outgoing, strict=True)
            ]
            incoming = [
                BoxedTensor(self._receive_buffer(view), piece.box)
                for view, piece in zip(self._views, exchange.incoming, strict=True)
            ]
            self._packed = self._stream.record_event()
        device = torch.device("cpu") if pinned else exchange.device
        self._buffers = exchange._replace(sends=outgoing, receives=incoming, device=device)
        self._start = start
        self._messages: UnderWay | None = None
        if at_once or exchange.route is not None:
            self._messages = self._started()

    def _packed_copy(self, view: Tensor) -> Tensor:
        """Packed on the device first: a host copy that also packs would be synchronous."""
        packed = view.contiguous()
        return self._buffer(view).copy_(packed, non_blocking=True) if self._pinned else packed

    def _buffer(self, view: Tensor) -> Tensor:
        if self._pinned:
            return torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
        return torch.empty(view.shape, dtype=view.dtype, device=view.device)

    def _receive_buffer(self, view: Tensor) -> Tensor:
        """The view itself if a message can be received in place, else a buffer."""
        in_place = view.is_contiguous() and not self._pinned
        return view if in_place else self._buffer(view)

    def _started(self) -> UnderWay:
        if not self._at_once and (self._buffers.sends or not self._pinned):
            self._packed.synchronize()
        with self._stream:
            return self._start(self._buffers)

    def is_done(self) -> bool:
        return self._messages is not None and self._messages.is_done()

    def peers(self) -> Sequence[int]:
        return () if self._messages is None else self._messages.peers()

    def wait(self) -> None:
        """Complete the messages; the current stream waits for unpacking."""
        self._messages = self._messages or self._started()
        with self._stream:
            self._messages.wait()
            for view, received in zip(self._views, self._buffers.receives, strict=True):
                if received.tensor is not view:
                    view.copy_(received.tensor, non_blocking=True)
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        self._keep, self._views = None, []
        self._buffers = self._buffers._replace(sends=[], receives=[])


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """Stream of a device for packing and unpacking."""
    return torch.Stream(device, priority=-1)
