"""A store for torch.distributed of which the ranks hear by MPI, so that no address is needed."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store  # type: ignore[attr-defined]


def store_by_mpi(world: MPI.Intracomm, wait: timedelta = timedelta(minutes=5)) -> Store:
    """A store on a free port of rank 0; all ranks must call it.

    Args:
        wait: how long a rank waits for a key.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosts = world.allgather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, True, wait, wait_for_workers=False)
    port = world.bcast(store.port if store else None)
    if store is None:
        store = TCPStore(host, port, world.size, False, wait)
    return store
