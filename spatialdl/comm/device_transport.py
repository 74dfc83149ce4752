"""Tensors on an accelerator over each of the ways of `comm.device_path`.

Nothing waits for the device but where a library on the host must read or write what it computes:
once for each message or sum, and for those of ``nccl`` never. Packing and unpacking run on a
stream of their own with a high priority, so that the work which the network queues goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Communicator, Message, Messages, Pending, Start, UnderWay
from spatialdl.comm.device_group import device_group
from spatialdl.comm.device_path import DevicePath, device_path
from spatialdl.comm.limit import timeout_of_groups
from spatialdl.comm.plan import Piece
from spatialdl.comm.single_process import Completed
from spatialdl.comm.waiting import noted


class DeviceTransport(Protocol):
    """What a `Communicator` asks for tensors on an accelerator; contiguous ones are summed."""

    def start_all_reduce(self, values: Tensor) -> Pending: ...

    def all_gather(self, values: Tensor) -> Tensor: ...

    def start_exchange(self, exchange: Exchange) -> UnderWay: ...


class OnHost(Protocol):
    """A communicator, and how it gathers into memory that is there."""

    def all_reduce_(self, values: Tensor) -> None: ...

    def gather_into(self, everybody: Tensor, own: Tensor) -> None: ...

    def start_exchange(self, exchange: Exchange) -> UnderWay: ...


class ThroughHost:
    """By pinned memory of the host, which PyTorch keeps for the next time.

    Args:
        comm: moves tensors on the host.
    """

    def __init__(self, comm: OnHost) -> None:
        self._comm = comm

    def start_all_reduce(self, values: Tensor) -> Pending:
        return _Later(pinned_copy(values), self._comm.all_reduce_, values)

    def all_gather(self, values: Tensor) -> Tensor:
        own, ready = pinned_copy(values)
        size: int = self._comm.size  # type: ignore[attr-defined]
        everybody = torch.empty((size, *own.shape), dtype=own.dtype, pin_memory=True)
        ready.synchronize()
        self._comm.gather_into(everybody, own)
        return everybody.to(values.device, non_blocking=True)

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, self._comm.start_exchange, pinned=True)


class _Later:
    """A sum on the host of what is being copied there."""

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
    """A copy in pinned memory, and when it is there."""
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    staged.copy_(values.contiguous(), non_blocking=True)
    return staged, torch.accelerator.current_stream(values.device).record_event()


class DeviceAware:
    """MPI reads and writes device memory where it lies, once the device has written it.

    Args:
        add: in place.
        gather_into: contiguous memory for all ranks, the own.
        start: messages of contiguous pieces.
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
        everybody = own.new_empty((self._comm.size, *own.shape))
        torch.accelerator.current_stream(values.device).synchronize()
        self._gather_into(everybody, own)
        return everybody

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, self._start)


class ByGroup:
    """NCCL, or what PyTorch has in its place: queued on the device, the host never waits.

    Its messages have no tags: what has a route goes by another way, or by a `Lane`.

    Args:
        path: with a store where groups meet.
        device: of this rank.
        routed: moves what has a route.
    """

    def __init__(
        self, comm: Communicator, path: DevicePath, device: torch.device, routed: DeviceTransport
    ) -> None:
        self._size, self._routed = comm.size, routed
        self._place = path, tuple(comm.world_ranks), comm.rank, device

    @cached_property
    def _group(self) -> Any:
        """Asked for the first time by all ranks together, which those of a route do not do."""
        return _group(*self._place)

    def start_all_reduce(self, values: Tensor) -> Pending:
        return _Queued(self._group.allreduce([values]), values)

    def all_gather(self, values: Tensor) -> Tensor:
        own = values.contiguous()
        everybody = own.new_empty((self._size, *own.shape))
        self._group._allgather_base(_bytes(everybody), _bytes(own)).wait()
        return everybody

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        if exchange.route is not None:
            return self._routed.start_exchange(exchange)
        return PackedExchange(exchange, partial(_queue, self._group), at_once=True)


class Lane:
    """Messages with a route without tags: matched in the order in which both sides start them.

    NCCL queues them in one stream, in which each waits until its peer has come to it. So a lane is
    for one direction between ranks that send and ranks that receive; all must make it together.

    Args:
        comm: has the ranks.
        ranks: of `comm`, in the order of the plans.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], device: torch.device) -> None:
        self.device, world = device, tuple(comm.world_ranks[rank] for rank in ranks)
        self._group = _group(device_path(), world, list(ranks).index(comm.rank), device)

    def start_exchange(self, exchange: Exchange) -> UnderWay:
        return PackedExchange(exchange, partial(_queue, self._group), at_once=True)


def _group(path: DevicePath, ranks: tuple[int, ...], rank: int, device: torch.device) -> Any:
    assert path.store is not None
    limit = timeout_of_groups() or dist.default_pg_timeout
    make = (path.store, ranks, rank, device, limit)
    return noted("setting up a group of devices", ranks, device_group, *make)


def _queue(group: Any, exchange: Exchange) -> UnderWay:
    """Queue all messages of an exchange at once; they start after what the stream has."""
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
    """What has bytes to move: images may have no samples."""
    return [pair for pair in zip(held, pieces, strict=True) if pair[0].tensor.numel() > 0]


class _Queued:
    """A sum for which the current stream waits."""

    def __init__(self, work: Any, values: Tensor) -> None:
        self._work, self._values = work, values

    def wait(self) -> None:
        self._work.wait()


def _bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as bytes: NCCL moves fewer types than there are."""
    return x.view(-1).view(torch.uint8)


class PackedExchange:
    """An exchange under way whose tensors lie on an accelerator.

    Its messages start when they are packed if they have a route, else when they are waited for.

    Args:
        start: starts to move contiguous buffers, one for each piece.
        pinned: the buffers are in pinned memory of the host; else on the device.
        at_once: `start` queues on the device; else it takes what is there, and the host waits.
    """

    def __init__(
        self, exchange: Exchange, start: Start, pinned: bool = False, at_once: bool = False
    ) -> None:
        self._keep: object = exchange  # or its memory would be used again
        self._views, self._pinned, self._at_once = exchange.landing(), pinned, at_once
        self._device, self._stream = exchange.device, side_stream(exchange.device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            outgoing = [
                BoxedTensor(self._packed_copy(view), piece.box)
                for view, piece in zip(exchange.leaving(), exchange.outgoing, strict=True)
            ]
            incoming = [
                BoxedTensor(self._room(view), piece.box)
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
        """Packed on the device, or the host would wait for a copy that also packs."""
        packed = view.contiguous()
        return self._buffer(view).copy_(packed, non_blocking=True) if self._pinned else packed

    def _buffer(self, view: Tensor) -> Tensor:
        if self._pinned:
            return torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
        return torch.empty(view.shape, dtype=view.dtype, device=view.device)

    def _room(self, view: Tensor) -> Tensor:
        """Where a message lands: at its place, if it can."""
        is_there = view.is_contiguous() and not self._pinned
        return view if is_there else self._buffer(view)

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
        """Talk, and have the current stream wait for the unpacking."""
        self._messages = self._messages or self._started()
        with self._stream:
            self._messages.wait()
            for view, landed in zip(self._views, self._buffers.receives, strict=True):
                if landed.tensor is not view:
                    view.copy_(landed.tensor, non_blocking=True)
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        self._keep, self._views = None, []
        self._buffers = self._buffers._replace(sends=[], receives=[])


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """The stream of a device on which views are packed and unpacked."""
    return torch.Stream(device, priority=-1)
