"""The ranks of the backend benchmark: all-reduces and data-parallel training, over all backends.

Prints one line of JSON: seconds on the slowest rank, one number a round, of an all-reduce of each
size and of a training step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import spatialdl.comm.backend  # noqa: F401  (registers it)
from spatialdl import models
from spatialdl.comm.backend.communication_thread import FINISHED
from spatialdl.comm.datatypes import buffer

Thing = TypeVar("Thing")
Todo = Callable[[], object]
OURS, RAW, GLOO, SILENT = "mpi4py backend", "raw mpi4py", "gloo", "no communication"
CALL = "PyTorch's call"
BYTES_A_ROUND = 2**22
"""Small all-reduces are repeated within a round, as many as move so much, but no more than 200."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="in bytes")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("mpi4py")
    gloo = dist.new_group(backend="gloo")
    found = {
        "all_reduce": all_reduces(options, gloo),
        "step": steps(options, gloo),
        "parameters": sum(p.numel() for p in _network(options).parameters()),
        "mpi": MPI.Get_library_version(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def all_reduces(
    options: argparse.Namespace, gloo: dist.ProcessGroup
) -> dict[str, dict[str, list[float]]]:
    """Seconds of an all-reduce for each size, of each backend, round by round."""
    found = {}
    world = MPI.Intracomm(MPI.COMM_WORLD.Dup())
    for size in _progress(options.sizes, "all-reduce"):
        calls = max(1, min(200, BYTES_A_ROUND // size))
        found[str(size)] = measure(_variants(size, gloo, world), options.rounds, calls)
    return found


_Group: Any = ProcessGroup  # its stubs do not know what it takes


class _Nothing(_Group):  # type: ignore[misc]
    """A group in Python whose all-reduce does nothing: what is left is PyTorch's call of it."""

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> Work:
        return FINISHED


def _variants(size: int, gloo: dist.ProcessGroup, world: MPI.Intracomm) -> dict[str, Todo]:
    tensor = torch.zeros(size // 4)
    message = [buffer(tensor), tensor.numel(), MPI.FLOAT]
    nothing = _Nothing(dist.get_rank(), dist.get_world_size())
    return {
        OURS: lambda: dist.all_reduce(tensor),
        RAW: lambda: world.Allreduce(MPI.IN_PLACE, message, MPI.SUM),
        GLOO: lambda: dist.all_reduce(tensor, group=gloo),
        CALL: lambda: dist.all_reduce(tensor, group=nothing),
    }


def steps(options: argparse.Namespace, gloo: dist.ProcessGroup) -> dict[str, list[float]]:
    """Seconds of a training step in data parallel."""
    torch.manual_seed(dist.get_rank())
    images = torch.randn(options.batch, 3, options.side, options.side)
    labels = torch.arange(options.batch) % 10
    ours = DistributedDataParallel(_network(options))
    theirs = DistributedDataParallel(_network(options), process_group=gloo)

    def step(model: DistributedDataParallel) -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]

    def silent() -> None:
        with ours.no_sync():
            step(ours)

    variants: dict[str, Todo] = {
        OURS: lambda: step(ours),
        GLOO: lambda: step(theirs),
        SILENT: silent,
    }
    return measure(variants, options.steps, 1, "training")


def _network(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = getattr(models, options.model)(num_classes=10)
    return network


def measure(
    variants: Mapping[str, Todo], rounds: int, calls: int, progress: str = ""
) -> dict[str, list[float]]:
    """Seconds of a call on the slowest rank, the variants in an order drawn anew each round."""
    for work in variants.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rng = random.Random(0)  # the same order on all ranks
    for _ in _progress(range(rounds), progress):
        for name, work in rng.sample(list(variants.items()), len(variants)):
            MPI.COMM_WORLD.Barrier()
            started = time.perf_counter()
            for _ in range(calls):
                work()
            own = (time.perf_counter() - started) / calls
            seconds[name].append(MPI.COMM_WORLD.allreduce(own, op=MPI.MAX))
    return seconds


def _progress(things: Iterable[Thing], name: str) -> Iterable[Thing]:
    bar: Iterable[Thing] = tqdm(things, desc=name, disable=dist.get_rank() != 0 or not name)
    return bar


if __name__ == "__main__":
    main()
