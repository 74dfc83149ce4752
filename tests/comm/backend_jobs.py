"""What the ranks of the jobs in test_backend.py do; run as ``backend_jobs.py NAME [ARGUMENT]``."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spatialdl.comm.backend  # noqa: F401  (registers it)

SHORT = timedelta(seconds=2)


def init(timeout: timedelta | None = None) -> int:
    dist.init_process_group("mpi4py", timeout=timeout)
    return dist.get_rank()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()


def leave_without_goodbye() -> None:
    """Nobody destroys anything, and a collective is still under way."""
    rank = init()
    dist.all_reduce(torch.ones(1_000_000), async_op=True)
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
    dist.isend(torch.ones(10), (rank + 1) % dist.get_world_size())
    del work
    print(f"rank {rank} leaves", flush=True)


def raise_on_one() -> None:
    rank = init()
    dist.barrier()
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(3))


def freeze() -> None:
    """A rank stops for ever, as on a machine that hangs: nobody hears of it."""
    rank = init(SHORT)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(3, 5))


def freeze_overlapped() -> None:
    """The same in backward, where a thread of its own waits."""
    rank = init(SHORT)
    model = DistributedDataParallel(network())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(1, 7, dtype=torch.float64)).sum().backward()


def wait_for_a_group() -> None:
    """The timeout of a group counts in it."""
    rank = init()
    group = dist.new_group(timeout=SHORT)
    if rank == 0:
        dist.all_gather_into_tensor(torch.empty(8, dtype=torch.int64), torch.ones(4).long(), group)
    else:
        dist.recv(torch.ones(1), 0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
