"""All ranks of this job, and their transport.

Imports neither PyTorch nor MPI before this process is known to be a rank.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

from spatialdl.comm.launch import LaunchInfo, check_mpi_world, initialise_mpi, launched
from spatialdl.comm.waiting import timeout_of_groups

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store  # type: ignore[attr-defined]

    from spatialdl.comm.communicator import Communicator


class _Chosen:
    world: Communicator | None = None


def start_world(transport: str = "auto") -> Communicator:
    """Join the ranks that the launcher started; collective.

    Starts the watchdog with the limit of `comm.waiting`, if one was set.

    Args:
        transport: ``mpi``, ``torch`` (torch.distributed), or ``auto``: torch under torchrun,
            which does not set up MPI, mpi otherwise.

    Returns:
        The future result of `world`; a single-process communicator without a launcher.

    Raises:
        ValueError: if MPI and the launcher disagree on the number of ranks.
    """
    from spatialdl.comm.single_process import SingleProcess
    from spatialdl.comm.watchdog import start_watchdog

    info = launched()
    if info is None:
        _Chosen.world = SingleProcess()
    elif transport == "torch" or (transport == "auto" and info.launcher == "torchrun"):
        _Chosen.world = torch_world(info)
    else:
        _Chosen.world = _mpi_world()
        check_mpi_world(_Chosen.world.size)
    if info is not None:
        start_watchdog(_Chosen.world)
    return _Chosen.world


def _has_address() -> bool:
    """Whether the environment has the rendezvous address of torch.distributed."""
    return {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def world() -> Communicator:
    """All ranks: as `start_world` set them up, else ``MPI.COMM_WORLD``.

    A program started by torchrun (or no launcher) that has initialised torch.distributed gets its
    ranks.

    Raises:
        ValueError: if torchrun has started several ranks without torch.distributed initialised.
    """
    if _Chosen.world is None:
        info = launched()
        by_mpi = info is not None and info.launcher != "torchrun"
        if info is not None and not by_mpi and info.size > 1 and not _is_initialised():
            raise ValueError(
                f"torchrun started {info.size} ranks, but torch.distributed is not initialised: "
                "call torch.distributed.init_process_group() first (dist.init_process_group), or "
                "start the program with mpiexec or srun to use MPI"
            )
        _Chosen.world = _mpi_world() if by_mpi or not _is_initialised() else torch_world(info)
    return _Chosen.world


def _is_initialised() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _mpi_world() -> Communicator:
    initialise_mpi()
    from mpi4py import MPI

    from spatialdl.comm.mpi import MpiCommunicator

    return MpiCommunicator(MPI.COMM_WORLD)


def as_communicator(comm: Communicator | MPI.Intracomm) -> Communicator:
    """Wrap a communicator of mpi4py; return any other one unchanged."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        return comm  # type: ignore[return-value]
    from spatialdl.comm.mpi import MpiCommunicator

    return comm if isinstance(comm, MpiCommunicator) else MpiCommunicator(comm)


def torch_world(info: LaunchInfo | None) -> Communicator:
    """All ranks over torch.distributed, which is initialised if necessary.

    Args:
        info: from `launched`.
    """
    from spatialdl.comm.distributed import TorchCommunicator

    if info is not None and not _is_initialised():
        start_process_group(info)
    return TorchCommunicator.world()


def start_process_group(info: LaunchInfo) -> None:
    """Initialise torch.distributed at the address in the environment, or else one from MPI."""
    import torch.distributed as dist

    from spatialdl.comm.device_path import backend_for, current_device

    device = current_device()
    of_device = backend_for(device)
    backend = "gloo" if of_device is None else f"cpu:gloo,{device.type}:{of_device}"
    limit, store = timeout_of_groups(), None
    if _has_address():
        store = _store_at_loopback(info)
    else:
        initialise_mpi()
        from mpi4py import MPI

        from spatialdl.comm.store import keep_to_loopback, on_one_machine, store_by_mpi

        check_mpi_world(MPI.COMM_WORLD.size)
        store = store_by_mpi(MPI.COMM_WORLD)
        if on_one_machine(MPI.COMM_WORLD):
            keep_to_loopback()
    # without a store torch.distributed uses the address in the environment
    rank, size = info.rank, info.size
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
    atexit.register(end_process_group)


def _store_at_loopback(info: LaunchInfo) -> Store | None:
    """Store at MASTER_ADDR, if that is the loopback and torchrun does not serve it already."""
    from spatialdl.comm.store import LOOPBACK, connect_store, keep_to_loopback, serve_store

    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(info.size)
    if os.environ["MASTER_ADDR"] not in (LOOPBACK, "localhost") and not one_machine:
        return None
    keep_to_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or one_machine:
        return None
    make = serve_store if info.rank == 0 else connect_store
    return make(LOOPBACK, int(os.environ["MASTER_PORT"]), info.size)


def end_process_group() -> None:
    """Destroy the default process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
