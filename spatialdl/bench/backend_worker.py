"""Ranks of the backend benchmark: all-reduces and data-parallel training over all backends.

Prints one line of JSON: seconds on the slowest rank per round, of an all-reduce of each size and
of a training step.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import spatialdl.comm.backend  # noqa: F401  (registers it)
from spatialdl import models
from spatialdl.bench.backend import CALL, OURS, RAW, SILENT
from spatialdl.bench.device import Stopwatch, describe, take_device, worker_options
from spatialdl.comm.backend.communication_thread import FINISHED
from spatialdl.comm.datatypes import buffer
from spatialdl.comm.device_group import backend_for
from spatialdl.comm.device_path import choose_device_path
from spatialdl.comm.world import start_world
from spatialdl.torch_internals import ProcessGroup, Work

Thing = TypeVar("Thing")
Todo = Callable[[], object]
BYTES_A_ROUND = 2**22
"""Bytes per round: small all-reduces are repeated to move this much, at most 200 times."""


def main() -> None:
    options = worker_options()
    device = take_device(options.device)
    other = _other_backend(device)
    dist.init_process_group("mpi4py")
    group = dist.new_group(backend=other)
    bench = Bench(options, device, other, group)
    found = {
        "all_reduce": bench.all_reduces(),
        "step": bench.steps(),
        "parameters": sum(p.numel() for p in bench.network().parameters()),
        "mpi": MPI.Get_library_version(),
        "device": describe(device),
        "other": other,
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _other_backend(device: torch.device) -> str:
    """PyTorch's own backend for a device: gloo on CPUs, NCCL or its equivalent on accelerators.

    Raises:
        ValueError: ranks share a device, which NCCL does not support.
    """
    path = choose_device_path(start_world(), device)
    if path is None:
        return "gloo"
    name = backend_for(device)
    if name is None or path.name != "nccl":
        raise ValueError(f"no other backend to compare with on {device.type}: {path.reason}")
    return name


_Group: Any = ProcessGroup  # its stubs lack the constructor's parameters


class _Nothing(_Group):  # type: ignore[misc]
    """Process group in Python with an empty all-reduce, to measure PyTorch's overhead."""

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> Work:
        return FINISHED


class Bench:
    """Measurements over the mpi4py backend and another backend.

    Args:
        options: options of the benchmark.
        device: device of this rank.
        other: name of the other backend.
        group: its process group of all ranks.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        other: str,
        group: dist.ProcessGroup,
    ) -> None:
        self._options, self._device = options, device
        self._other, self._group = other, group
        self._world = MPI.Intracomm(MPI.COMM_WORLD.Dup())

    def all_reduces(self) -> dict[str, dict[str, list[float]]]:
        """Seconds of an all-reduce by size, backend and round."""
        found = {}
        for size in _progress(_sizes(self._options.most), "all-reduce"):
            calls = max(1, min(200, BYTES_A_ROUND // size))
            variants = self._variants(size)
            found[str(size)] = measure(variants, self._options.rounds, calls, self._device)
        return found

    def _variants(self, size: int) -> dict[str, Todo]:
        tensor = torch.zeros(size // 4, device=self._device)
        nothing = _Nothing(dist.get_rank(), dist.get_world_size())
        return {
            OURS: lambda: dist.all_reduce(tensor),
            RAW: self._raw(tensor),
            self._other: lambda: dist.all_reduce(tensor, group=self._group),
            CALL: lambda: dist.all_reduce(tensor, group=nothing),
        }

    def _raw(self, tensor: torch.Tensor) -> Todo:
        """All-reduce with plain mpi4py; tensors on an accelerator are staged in pinned memory."""
        on_host = tensor if tensor.is_cpu else torch.zeros(tensor.shape, pin_memory=True)
        message = [buffer(on_host), on_host.numel(), MPI.FLOAT]

        def add() -> None:
            self._world.Allreduce(MPI.IN_PLACE, message, MPI.SUM)

        def copy_and_add() -> None:
            on_host.copy_(tensor, non_blocking=True)
            torch.accelerator.current_stream(tensor.device).synchronize()
            add()
            tensor.copy_(on_host, non_blocking=True)

        return add if tensor.is_cpu else copy_and_add

    def steps(self) -> dict[str, list[float]]:
        """Seconds of a data-parallel training step by backend and round."""
        options = self._options
        torch.manual_seed(dist.get_rank())
        images = torch.randn(options.batch, 3, options.side, options.side).to(self._device)
        labels = torch.arange(options.batch, device=self._device) % 10
        ours = DistributedDataParallel(self.network())
        theirs = DistributedDataParallel(self.network(), process_group=self._group)

        def step(model: DistributedDataParallel) -> None:
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]

        def silent() -> None:
            with ours.no_sync():
                step(ours)

        variants: dict[str, Todo] = {
            OURS: lambda: step(ours),
            self._other: lambda: step(theirs),
            SILENT: silent,
        }
        return measure(variants, options.steps, 1, self._device, "training")

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        network: nn.Module = getattr(models, self._options.model)(num_classes=10)
        return network.to(self._device)


def _sizes(most: int) -> list[int]:
    """Sizes of the all-reduces in bytes."""
    return [4**power for power in range(1, 14) if 4**power <= most]


def measure(
    variants: Mapping[str, Todo],
    rounds: int,
    calls: int,
    device: torch.device,
    progress: str = "",
) -> dict[str, list[float]]:
    """Seconds of a call on the slowest rank; variants run in a random order each round."""
    for work in variants.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rng = random.Random(0)  # the same order on all ranks
    watch = Stopwatch(device)
    for _ in _progress(range(rounds), progress):
        for name, work in rng.sample(list(variants.items()), len(variants)):
            MPI.COMM_WORLD.Barrier()
            watch.start()
            for _ in range(calls):
                work()
            own = watch.stop() / calls
            seconds[name].append(MPI.COMM_WORLD.allreduce(own, op=MPI.MAX))
    return seconds


def _progress(things: Iterable[Thing], name: str) -> Iterable[Thing]:
    bar: Iterable[Thing] = tqdm(things, desc=name, disable=dist.get_rank() != 0 or not name)
    return bar


if __name__ == "__main__":
    main()
