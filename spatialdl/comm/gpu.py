"""Views on a GPU on their way to MPI or gloo.

They are packed, sent from buffers that the transport can read, and unpacked: device memory where
MPI is CUDA-aware, else pinned host memory. Packing and unpacking run on a stream of their own, so
that the work which the network queues meanwhile goes on; the host waits for the event of the
packing only, and only when the result is asked for.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from spatialdl.comm.communicator import UnderWay
from spatialdl.comm.held import Exchange, Held

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("spatialdl.comm")

Start = Callable[[Exchange], UnderWay]


class StagedExchange:
    """An exchange under way whose tensors lie on a GPU.

    Its messages start when they are packed if they have a route, else when they are waited for.

    Args:
        start: starts to move contiguous buffers, one for each piece.
        on_device: whether `start` can read device memory; else it gets pinned host memory.
    """

    def __init__(self, exchange: Exchange, start: Start, on_device: bool) -> None:
        self._keep: object = exchange  # or its memory would be used again
        self._views, self._on_device = exchange.landing(), on_device
        self._current = torch.cuda.current_stream(exchange.device)
        self._stream = side_stream(exchange.device)
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            outgoing = [
                Held(self._buffer(view).copy_(view, non_blocking=True), piece.box)
                for view, piece in zip(exchange.leaving(), exchange.outgoing, strict=True)
            ]
            incoming = [
                Held(self._buffer(view), piece.box)
                for view, piece in zip(self._views, exchange.incoming, strict=True)
            ]
            self._packed = self._stream.record_event()
        device = exchange.device if on_device else torch.device("cpu")
        self._buffers = exchange._replace(sends=outgoing, receives=incoming, device=device)
        self._start = start
        self._messages = None if exchange.route is None else self._started()

    def _buffer(self, view: Tensor) -> Tensor:
        if self._on_device:
            return torch.empty(view.shape, dtype=view.dtype, device=view.device)
        return torch.empty(view.shape, dtype=view.dtype, pin_memory=True)

    def _started(self) -> UnderWay:
        if self._buffers.sends or self._on_device:
            self._packed.synchronize()
        return self._start(self._buffers)

    def is_done(self) -> bool:
        return self._messages is not None and self._messages.is_done()

    def peers(self) -> Sequence[int]:
        return () if self._messages is None else self._messages.peers()

    def wait(self) -> None:
        """Talk, and have the current stream wait for the unpacking."""
        self._messages = self._messages or self._started()
        self._messages.wait()
        with torch.cuda.stream(self._stream):
            for view, landed in zip(self._views, self._buffers.receives, strict=True):
                view.copy_(landed.tensor, non_blocking=True)
        self._current.wait_stream(self._stream)
        self._keep, self._views = None, []
        self._buffers = self._buffers._replace(sends=[], receives=[])


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which views are packed and unpacked."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_AWARE: dict[torch.device, bool] = {}


def cuda_aware(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether MPI reads and writes this device's memory; all ranks find the same.

    What the library says of itself is not enough: a small exchange must succeed too. It happens
    once a process, when all ranks of `comm` come to their first exchange.
    """
    if device not in _AWARE:
        claimed = all(comm.allgather(says_cuda_aware()))
        _AWARE[device] = claimed and all(comm.allgather(_moves_device_memory(comm, device)))
        if comm.rank == 0:
            found = "is CUDA-aware" if _AWARE[device] else "is not CUDA-aware: through the host"
            log.info("MPI %s", found)
    return _AWARE[device]


def says_cuda_aware() -> bool:
    """Whether the MPI library says that it takes device memory.

    By the info key of MPI 4.1, or by the function that Open MPI and MPICH have for it.
    """
    from mpi4py import MPI

    kinds = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")):
        return True
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def _moves_device_memory(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Send a few numbers around the ring, from device memory to device memory."""
    from mpi4py import MPI

    own = torch.full((1024,), comm.rank, dtype=torch.int32, device=device)
    landed = torch.full_like(own, -1)
    torch.cuda.current_stream(device).synchronize()
    ours, theirs = (
        [MPI.buffer.fromaddress(x.data_ptr(), x.numel() * 4), x.numel(), MPI.INT32_T]
        for x in (own, landed)
    )
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    try:
        comm.Sendrecv(ours, after, 0, theirs, before, 0)
    except MPI.Exception:
        return False
    return cast("bool", (landed == before).all().item())
