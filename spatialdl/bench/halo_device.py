"""Hand-written halo exchanges between accelerators, with preallocated buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.datatypes import buffer
from spatialdl.comm.device_group import backend_for, device_group
from spatialdl.comm.device_path import device_path


class DevicePieces(NamedTuple):
    """Views on an accelerator to send and receive.

    Attributes:
        sends: views to send.
        receives: views to receive into.
        targets: destination rank of each of `sends`.
        sources: source rank of each of `receives`.
    """

    sends: Sequence[Tensor]
    receives: Sequence[Tensor]
    targets: Sequence[int]
    sources: Sequence[int]


def variants_on_device(pieces: DevicePieces, comm: MPI.Intracomm) -> dict[str, Callable[[], None]]:
    """Variants through host memory, and by the transfer path of the device."""
    found = {"pack, pinned, Isend/Irecv": _through_host(pieces, comm)}
    device, path = pieces.sends[0].device, device_path().name
    if path == "nccl":
        found[f"pack, {backend_for(device)} send/recv"] = _by_group(pieces, comm)
    if path == "mpi":
        found["pack, Isend/Irecv"] = _device_aware(pieces, comm)
    return found


def _through_host(pieces: DevicePieces, comm: MPI.Intracomm) -> Callable[[], None]:
    packed, landed = _buffers(pieces)
    outgoing, incoming = _pinned(packed), _pinned(landed)
    stream = torch.accelerator.current_stream(packed[0].device)

    def exchange() -> None:
        _copy(pieces.sends, packed)
        _copy(packed, outgoing)
        stream.synchronize()
        _send_and_receive(comm, pieces, outgoing, incoming)
        _copy(incoming, landed)
        _copy(landed, pieces.receives)

    return exchange


def _device_aware(pieces: DevicePieces, comm: MPI.Intracomm) -> Callable[[], None]:
    packed, landed = _buffers(pieces)
    stream = torch.accelerator.current_stream(packed[0].device)

    def exchange() -> None:
        _copy(pieces.sends, packed)
        stream.synchronize()
        _send_and_receive(comm, pieces, packed, landed)
        _copy(landed, pieces.receives)

    return exchange


def _by_group(pieces: DevicePieces, comm: MPI.Intracomm) -> Callable[[], None]:
    packed, landed = _buffers(pieces)
    device, store = packed[0].device, device_path().store
    assert store is not None
    ranks = tuple(range(comm.size))
    group = device_group(store, ranks, comm.rank, device, dist.default_pg_timeout)

    def exchange() -> None:
        _copy(pieces.sends, packed)
        group._start_coalescing(device)
        for tensor, source in zip(landed, pieces.sources, strict=True):
            group.recv([tensor], source, 0)
        for tensor, target in zip(packed, pieces.targets, strict=True):
            group.send([tensor], target, 0)
        group._end_coalescing(device).wait()
        _copy(landed, pieces.receives)

    return exchange


def _buffers(pieces: DevicePieces) -> tuple[list[Tensor], list[Tensor]]:
    """Contiguous send and receive buffers."""
    sends, receives = (
        [torch.empty(view.shape, device=view.device) for view in views]
        for views in (pieces.sends, pieces.receives)
    )
    return sends, receives


def _pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, pin_memory=True) for tensor in tensors]


def _copy(tensors: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, target in zip(tensors, into, strict=True):
        target.copy_(tensor, non_blocking=True)


def _send_and_receive(
    comm: MPI.Intracomm,
    pieces: DevicePieces,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
) -> None:
    requests = [
        comm.Irecv(buffer(tensor), source)
        for tensor, source in zip(incoming, pieces.sources, strict=True)
    ]
    requests += [
        comm.Isend(buffer(tensor), target)
        for tensor, target in zip(outgoing, pieces.targets, strict=True)
    ]
    MPI.Request.Waitall(requests)
