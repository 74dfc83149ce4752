"""Store for torch.distributed whose address the ranks exchange by MPI.

PyTorch's own store listens on all addresses of a machine, and accepts every client. This one gets
a listening port on the ranks' interface only: the loopback on one machine.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
_WAIT = timedelta(minutes=5)


def store_by_mpi(world: MPI.Intracomm, wait: timedelta = _WAIT) -> Store:
    """Create a store on a free port of rank 0; collective.

    Args:
        wait: how long a rank waits for a key.
    """
    address = _address_of_rank_0(world)
    store = None
    if world.rank == 0:
        store = serve_store(address, 0, world.size, wait)
    port = world.bcast(store.port if store else None)
    return store or connect_store(address, port, world.size, wait)


def serve_store(address: str, port: int, size: int, wait: timedelta = _WAIT) -> TCPStore:
    """Create a store that listens on one address.

    Args:
        address: address of this machine, as seen by other ranks. If no interface has it (behind a
            router), the store listens on all addresses.
        port: 0 for a free one.
        size: number of ranks that will use it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=max(128, size))
    except OSError:
        return TCPStore(address, port, size, True, wait, wait_for_workers=False)
    port, handle = listener.getsockname()[1], listener.detach()
    return TCPStore(
        address, port, size, True, wait, wait_for_workers=False, master_listen_fd=handle
    )


def connect_store(address: str, port: int, size: int, wait: timedelta = _WAIT) -> TCPStore:
    """Connect to the store that another rank serves."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, size, False, wait)


def on_one_machine(world: MPI.Intracomm) -> bool:
    """Whether all ranks are on the same machine; collective."""
    return len(set(world.allgather(socket.gethostname()))) == 1


def keep_to_loopback() -> None:
    """Have gloo and NCCL listen on the loopback, unless the user named another interface."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _address_of_rank_0(world: MPI.Intracomm) -> str:
    """Address of rank 0 as other machines resolve it; its own name may resolve to the loopback."""
    hosts = world.allgather(socket.gethostname())
    remote = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if remote is None:
        return LOOPBACK
    address = hosts[0]
    if world.rank == remote:
        with suppress(OSError):
            address = str(socket.getaddrinfo(hosts[0], None, type=socket.SOCK_STREAM)[0][4][0])
    return str(world.bcast(address, root=remote))
