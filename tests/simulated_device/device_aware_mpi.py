"""MPI that takes device memory, as CUDA-aware MPI does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from mpi4py import MPI

from spatialdl.comm import device_path

_buffer = MPI.buffer


class Buffer:
    """`MPI.buffer`, but for device addresses: what lies there now, whatever streams still do."""

    def __new__(cls, memory: Any) -> Any:
        return _buffer(memory)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> MPI.buffer:
        if torch.sim.pointer_kind(address).startswith("device"):
            address = torch.sim.host_address(address)
        return _buffer.fromaddress(address, nbytes, readonly)


def take_device_memory() -> None:
    """Have MPI report and provide support for memory of the device."""
    MPI.buffer = Buffer
    device_path.reports_device_aware = lambda device: device.type == "sim"


@contextlib.contextmanager
def device_aware_mpi() -> Iterator[None]:
    """Have `MPI.buffer.fromaddress` take device addresses for a while."""
    MPI.buffer = Buffer
    try:
        yield
    finally:
        MPI.buffer = _buffer
