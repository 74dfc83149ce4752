"""Worker of the spatial benchmark: training steps of a network, in one process or on ranks.

Prints one line of JSON: seconds of each step, CPU seconds per step of all ranks together, and the
peak memory of the largest rank: of its accelerator, or resident minus that of the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spatialdl
from spatialdl import models
from spatialdl.bench.device import Stopwatch, describe, take_device
from spatialdl.checking.network import find_builder
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_group import backend_for
from spatialdl.comm.device_path import choose_device_path
from spatialdl.comm.store import store_by_mpi
from spatialdl.comm.world import start_world
from spatialdl.torch_internals import import_compiler
from spatialdl.training.peak_memory import peak_memory_mb

WARM_UP = 1
CLASSES = 10
CONVOLUTIONS = "convolutions"
"""A network of this benchmark only, see `convolutions`."""
OVER_LIMIT = 75
"""Exit code of a rank that exceeded its memory limit."""


def main() -> None:
    install_abort_hook()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--grid", type=int, nargs="+")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--ddp", action="store_true", help="ranks share the batch, by DDP")
    parser.add_argument("--limit", type=float, help="MB above the baseline; aborts beyond")
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    import_compiler()  # optimizers import it; counts as imports, not training
    device = take_device(options.device)
    mesh = spatialdl.init_mesh(tuple(options.grid), check=False) if options.grid else None
    comm = mesh.comm if mesh else start_world()
    if options.ddp:
        _start_ddp(comm, device)
        options.batch //= comm.size
    baseline = peak_memory_mb(device)
    if options.limit is not None:
        Thread(target=_watch, args=(device, baseline + options.limit), daemon=True).start()
    with _abort_without_memory():
        found = measure(options, mesh, comm, device)
    found["memory_mb"] = peak_memory_mb(device) - baseline
    of_ranks = comm.gather(found)
    if of_ranks is not None:
        print(json.dumps(_together(of_ranks)))
    if options.ddp:
        dist.destroy_process_group()


def measure(
    options: argparse.Namespace,
    mesh: spatialdl.Mesh | None,
    comm: Communicator,
    device: torch.device,
) -> dict[str, Any]:
    """Train `steps` steps after a warm-up; with the same images and weights in all variants."""
    model = _network(options, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = _images(options, mesh, device)
    labels = _labels(options, mesh, device)
    seconds = []
    cpu = 0.0
    watch = Stopwatch(device)
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            cpu = time.process_time()
        comm.barrier()
        watch.start()
        _train_step(model, optimizer, images, labels, mesh)
        seconds.append(watch.stop())
    return {
        "seconds": seconds[WARM_UP:],
        "cpu_seconds": (time.process_time() - cpu) / options.steps,
        "threads": torch.get_num_threads(),
        "device": describe(device),
    }


def _network(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = _builder(options.model)(num_classes=CLASSES)
    if options.recompute:
        spatialdl.recompute_blocks(model)
    model.to(device)
    return DistributedDataParallel(model) if options.ddp else model


def _builder(model: str) -> Callable[..., nn.Module]:
    if model == CONVOLUTIONS:
        return convolutions
    return find_builder(model) if "." in model else getattr(models, model)


def _start_ddp(comm: Communicator, device: torch.device) -> None:
    """Start a process group for DDP: NCCL or its equivalent on accelerators, gloo on CPUs.

    Ranks that share devices use the mpi4py backend, as NCCL does not support them.
    """
    import_module("spatialdl.comm.backend")  # registers the backend
    path = choose_device_path(comm, device)
    name = "gloo" if path is None else backend_for(device) if path.name == "nccl" else "mpi4py"
    store = store_by_mpi(comm)  # type: ignore[arg-type]
    dist.init_process_group(name, store=store, rank=comm.rank, world_size=comm.size)


@contextmanager
def _abort_without_memory() -> Iterator[None]:
    """Abort the job if the device is out of memory, as beyond the limit."""
    try:
        yield
    except torch.OutOfMemoryError:
        _end_over_limit()


def _images(
    options: argparse.Namespace, mesh: spatialdl.Mesh | None, device: torch.device
) -> Tensor:
    """Create the images; a rank computes its own box only."""
    size = _size(options)
    at = [
        torch.arange(start, stop).view(-1, *(1,) * (len(size) - 1 - dim))
        for dim, (start, stop) in enumerate(_own(size, mesh))
    ]
    slow, fast = sum(0.05 * n for n in at), sum(0.3 * n for n in at)
    picture = torch.sin(fast + 0.4 * at[0]) + torch.cos(slow - 0.16 * at[-1])
    channels = {"unet3d": 1, CONVOLUTIONS: 64}.get(options.model, 3)
    images = picture.expand(options.batch, channels, *picture.shape).contiguous().to(device)
    return spatialdl.from_local(images, mesh, size) if mesh else images


def _labels(
    options: argparse.Namespace, mesh: spatialdl.Mesh | None, device: torch.device
) -> Tensor:
    """One class per image; for a U-Net, one per pixel of this rank's box."""
    labels = torch.arange(options.batch, device=device) % CLASSES
    if options.model not in ("unet", "unet3d"):
        return labels
    size = _size(options)
    own = [stop - start for start, stop in _own(size, mesh)]
    masks = labels.view(-1, *(1,) * len(own)).repeat(1, *own)
    return spatialdl.from_local(masks, mesh, size) if mesh else masks


def _size(options: argparse.Namespace) -> tuple[int, ...]:
    return (options.size,) * dims_of(options.model)


def _own(size: tuple[int, ...], mesh: spatialdl.Mesh | None) -> list[tuple[int, int]]:
    """Start and stop of this rank's box in each spatial dim."""
    if mesh is None:
        return [(0, n) for n in size]
    bounds = mesh.box(size)
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def name_of(model: str) -> str:
    """The last word of ``package.module.function`` or ``file.py:function``."""
    return model.replace(":", ".").rpartition(".")[2]


def dims_of(model: str) -> int:
    """Number of spatial dims of the images of a network."""
    return 3 if model == "unet3d" else 2


def convolutions(num_classes: int) -> nn.Module:
    """Stack of eight 3 x 3 convolutions with 64 channels, the fifth with stride 2.

    Compares convolutions of tiles with halos against padded copies.
    """
    strides = (1, 1, 1, 1, 2, 1, 1, 1)
    layers = (nn.Conv2d(64, 64, 3, stride, 1, bias=False) for stride in strides)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def _train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    mesh: spatialdl.Mesh | None,
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    if mesh is not None:
        spatialdl.average_gradients(model, mesh)
    optimizer.step()


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)],
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "memory_mb": max(rank["memory_mb"] for rank in ranks),
        "threads": ranks[0]["threads"],
        "device": ranks[0]["device"],
        "host": os.uname().nodename,
    }


def _watch(device: torch.device, most: float) -> None:
    """Exit when the process exceeds `most` MB."""
    while peak_memory_mb(device) <= most:
        Event().wait(0.05)
    _end_over_limit()


def _end_over_limit() -> None:
    os.write(1, b"over limit\n")
    os._exit(OVER_LIMIT)


if __name__ == "__main__":
    main()
