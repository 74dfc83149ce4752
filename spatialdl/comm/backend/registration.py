"""Registers the `mpi4py` backend with torch.distributed, and shuts down its groups at exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from mpi4py import MPI

from spatialdl.comm.backend import calls
from spatialdl.comm.backend.host import device_kinds
from spatialdl.comm.backend.process_group import NAME, MpiProcessGroup
from spatialdl.torch_internals import backend_plugins, rendezvous_handlers, self_recording_backends

Rendezvous = Iterator[tuple[Any, int, int]]
MakeStore = Callable[[MPI.Intracomm, timedelta], Any]
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")


_open: list[MpiProcessGroup] = []
"""Groups that are not shut down."""


def register(make_store: MakeStore) -> None:
    """Register the backend and its rendezvous with torch.distributed; idempotent.

    Args:
        make_store: creates a rendezvous store for all ranks of MPI; collective.
    """
    if NAME.upper() in backend_plugins:
        return
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=device_kinds())
    # since 2.15 groups of all other backends get a flight recorder, which looks for a backend
    # inside the group: in one written in Python there is none
    self_recording_backends.add(NAME)
    default = "env"
    rendezvous_handlers[default] = _env_or_mpi(rendezvous_handlers[default], make_store)


def _env_or_mpi(
    by_environment: Callable[..., Rendezvous], make_store: MakeStore
) -> Callable[..., Rendezvous]:
    """Rendezvous by environment variables, or by MPI if they are not set."""

    def rendezvous(url: str, timeout: timedelta, **kwargs: Any) -> Rendezvous:
        query = {key: int(values[0]) for key, values in parse_qs(urlparse(url).query).items()}
        wanted = [*_ENVIRONMENT, *({"rank", "world_size"} - query.keys())]
        if all(name.upper() in os.environ for name in wanted):
            yield from by_environment(url, timeout=timeout, **kwargs)
        else:
            world = MPI.COMM_WORLD
            _check_place(query.get("rank", world.rank), query.get("world_size", world.size))
            yield make_store(world, timeout), world.rank, world.size

    return rendezvous


def _check_place(rank: int, size: int) -> None:
    """Check rank and size against MPI.

    Raises:
        ValueError: if they differ.
    """
    world = MPI.COMM_WORLD
    if (rank, size) != (world.rank, world.size):
        raise ValueError(
            f"torch.distributed has rank {rank} of {size}, but MPI has rank {world.rank} of "
            f"{world.size} for this process; launch with mpiexec or srun, and omit rank and "
            "world_size"
        )


def _make_group(options: Any, _: object) -> MpiProcessGroup:
    """Constructor of a group, called by torch.distributed on its ranks."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "the mpi4py backend needs an MPI that is initialised with MPI_THREAD_MULTIPLE: do not "
            "change mpi4py.rc.thread_level"
        )
    ranks = list(options.global_ranks_in_group)
    if ranks:
        world_group = MPI.COMM_WORLD.Get_group()
        chosen = world_group.Incl(ranks)
        comm = MPI.COMM_WORLD.Create_group(chosen)
        chosen.Free()
        world_group.Free()
    else:
        _check_place(options.group_rank, options.group_size)
        ranks = list(range(options.group_size))
        comm = MPI.COMM_WORLD.Dup()
    if not _open:
        calls.watch_calls()
        atexit.unregister(_drain)
        atexit.register(_drain)
        _end_job_on_exceptions()
    group = MpiProcessGroup(comm, options.store, options.group_id, ranks, options.timeout, _closed)
    _open.append(group)
    return group


def _closed(group: MpiProcessGroup) -> None:
    """Forget a group that was shut down."""
    _open.remove(group)


def _drain() -> None:
    """Complete pending operations of groups that the program has not destroyed."""
    for group in _open:
        group.drain()


@cache
def _end_job_on_exceptions() -> None:
    """Abort the job on an uncaught exception, as other ranks may wait for this one."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None, /) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):  # PyTorch buffers stderr
            before(kind, error, at)
        if _open and MPI.COMM_WORLD.size > 1:
            calls.end_job()

    sys.excepthook = hook
