"""How torch.distributed learns of the `mpi4py` backend, and its groups until the job ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from mpi4py import MPI

from spatialdl.comm.backend.host import device_kinds
from spatialdl.comm.backend.process_group import NAME, MpiProcessGroup
from spatialdl.comm.ending import end_job_for_sure
from spatialdl.comm.launch import check_mpi_world
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.store import store_by_mpi
from spatialdl.comm.watchdog import watch_calls

Rendezvous = Iterator[tuple[Any, int, int]]
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")


_open: list[MpiProcessGroup] = []
"""The groups that are not shut down."""


def register() -> None:
    """Make the backend and its rendezvous known to torch.distributed; once is enough."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=device_kinds())
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = _env_or_mpi(handlers["env"])  # the one that is taken when none is named


def _env_or_mpi(by_environment: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """A rendezvous by environment variables as before, and by MPI where they are not set."""

    def rendezvous(url: str, timeout: timedelta, **kwargs: Any) -> Rendezvous:
        asked = {key: int(values[0]) for key, values in parse_qs(urlparse(url).query).items()}
        wanted = [*_ENVIRONMENT, *({"rank", "world_size"} - asked.keys())]
        if all(name.upper() in os.environ for name in wanted):
            yield from by_environment(url, timeout=timeout, **kwargs)
        else:
            world = MPI.COMM_WORLD
            check_mpi_world(world.size)
            _check_place(asked.get("rank", world.rank), asked.get("world_size", world.size))
            yield store_by_mpi(world, timeout), world.rank, world.size

    return rendezvous


def _check_place(rank: int, size: int) -> None:
    """Whether this is what MPI says too.

    Raises:
        ValueError: with both.
    """
    world = MPI.COMM_WORLD
    if (rank, size) != (world.rank, world.size):
        raise ValueError(
            f"torch.distributed calls this process rank {rank} of {size}, MPI calls it rank "
            f"{world.rank} of {world.size}; start it with mpiexec or srun, and leave rank and "
            "world_size to MPI"
        )


def _make_group(options: Any, _: object) -> MpiProcessGroup:
    """What torch.distributed calls on the ranks of a new group."""
    ranks = list(options.global_ranks_in_group)
    if ranks:
        everybody = MPI.COMM_WORLD.Get_group()
        chosen = everybody.Incl(ranks)
        comm = MPI.COMM_WORLD.Create_group(chosen)
        chosen.Free()
        everybody.Free()
    else:
        _check_place(options.group_rank, options.group_size)
        ranks = list(range(options.group_size))
        comm = MPI.COMM_WORLD.Dup()
    if not _open:
        world = None if options.global_ranks_in_group else MpiCommunicator(MPI.COMM_WORLD)
        watch_calls(MPI.COMM_WORLD.rank, world)
        atexit.unregister(_drain)
        atexit.register(_drain)  # before the watchdog ends
        _end_job_on_exceptions()
    group = MpiProcessGroup(comm, options.store, options.group_id, ranks, options.timeout, _closed)
    _open.append(group)
    return group


def _closed(group: MpiProcessGroup) -> None:
    """A group was shut down."""
    _open.remove(group)


def _drain() -> None:
    """At the end of a program that has not destroyed its groups."""
    for group in _open:
        group.drain()


def _end_job_on_exceptions() -> None:
    """End the job when an exception ends this rank: the others may wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None, /) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):  # PyTorch holds back what is printed
            before(kind, error, at)
        if _open and MPI.COMM_WORLD.size > 1:
            end_job_for_sure()

    sys.excepthook = hook
