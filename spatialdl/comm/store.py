"""A store for torch.distributed of which the ranks hear by MPI, so that no address is needed.

PyTorch's own listens on all addresses of a machine, and answers whoever asks. So it is given a port
that listens where the ranks are and nowhere else: on one machine that is the loopback.
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
    """A store on a free port of rank 0; all ranks must call it.

    Args:
        wait: how long a rank waits for a key.
    """
    address = _address_of_rank_0(world)
    store = None
    if world.rank == 0:
        store = serve_store(address, 0, world.size, wait)
    port = world.bcast(store.port if store else None)
    return store or ask_store(address, port, world.size, wait)


def serve_store(address: str, port: int, size: int, wait: timedelta = _WAIT) -> TCPStore:
    """A store that listens at one address.

    Args:
        address: of this machine, as others find it. If it has none such (behind a router), all of
            its addresses listen.
        port: 0 for a free one.
        size: ranks that will use it.
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


def ask_store(address: str, port: int, size: int, wait: timedelta = _WAIT) -> TCPStore:
    """The store that another rank serves."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, size, False, wait)


def on_one_machine(world: MPI.Intracomm) -> bool:
    """Whether all ranks are on the same machine; all must ask."""
    return len(set(world.allgather(socket.gethostname()))) == 1


def keep_to_loopback() -> None:
    """Have gloo and NCCL listen on the loopback, where nobody has named another interface."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _address_of_rank_0(world: MPI.Intracomm) -> str:
    """By which the ranks of other machines find its own: there its name may stand for itself."""
    hosts = world.allgather(socket.gethostname())
    asks = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if asks is None:
        return LOOPBACK
    found = hosts[0]
    if world.rank == asks:
        with suppress(OSError):
            found = str(socket.getaddrinfo(hosts[0], None, type=socket.SOCK_STREAM)[0][4][0])
    return str(world.bcast(found, root=asks))
