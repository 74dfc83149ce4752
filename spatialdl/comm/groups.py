"""Groups of torch.distributed over a named backend, independent of the ranks' transport.

``nccl`` stands for PyTorch's backend of the accelerator, as in `device_path`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import backend_for, current_device, device_path
from spatialdl.comm.distributed import TorchCommunicator, local_group
from spatialdl.comm.launch import launched
from spatialdl.comm.waiting import noted, timeout_of_groups
from spatialdl.comm.world import end_process_group, start_process_group

BACKENDS = ("mpi4py", "gloo", "nccl")


def backend_of(comm: Communicator, device: torch.device) -> str:
    """Backend that matches the transport of a communicator."""
    if not isinstance(comm, TorchCommunicator):
        return "mpi4py"
    return "nccl" if device.type != "cpu" and device_path().name == "nccl" else "gloo"


def new_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a group over a backend; collective over exactly these ranks, in ascending order.

    Raises:
        ValueError: if the backend is unavailable.
    """
    start(name)
    group = local_group(ranks, (backend_for(current_device()) if name == "nccl" else None) or name)
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def start(name: str) -> None:
    """Initialise torch.distributed if necessary; collective over the world.

    Raises:
        ValueError: if the backend is unavailable.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name}, must be one of {', '.join(BACKENDS)}")
    if name == "nccl" and backend_for(current_device()) is None:
        raise ValueError(
            f"backend nccl needs GPUs, but PyTorch has no collectives for "
            f"{current_device().type}: use mpi4py or gloo"
        )
    path = device_path()
    if name == "nccl" and path.name != "nccl":
        raise ValueError(
            f"comm.backend=nccl needs comm.device_path=nccl, but the device path is {path.name} "
            f"({path.reason}): set comm.backend=mpi4py or gloo"
        )
    if name == "mpi4py":
        _register()
    if dist.is_initialized():
        return
    info = launched()
    if name == "mpi4py":
        dist.init_process_group("mpi4py", timeout=timeout_of_groups())
        atexit.register(end_process_group)
    elif info is not None:
        start_process_group(info)


def _noted(call: Any, job: Callable[[], object]) -> None:
    """Record a call of the backend for hang reports."""
    noted(call.group, call.group.ranks, noted, call, None, job)


def _register() -> None:
    from mpi4py import MPI

    from spatialdl.comm.backend import calls

    calls.around = _noted

    if dist.is_initialized() and dist.get_world_size() != MPI.COMM_WORLD.size:
        raise ValueError(
            f"backend mpi4py has {MPI.COMM_WORLD.size} ranks, but torch.distributed has "
            f"{dist.get_world_size()}: launch with mpiexec or srun, or use gloo"
        )
