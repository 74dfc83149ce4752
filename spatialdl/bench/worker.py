"""One side of the spatial benchmark: training steps of a network, in one process or on ranks.

Prints one line of JSON: seconds of each step, CPU seconds a step of all ranks together, and the
peak resident memory of the largest rank above what the imports take.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from importlib import import_module
from threading import Event, Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl import models
from spatialdl.comm.abort import install_abort_hook
from spatialdl.pipeline.partition import cut

WARM_UP = 1
CLASSES = 10
OVER_LIMIT = 75
"""Exit code of a rank that took more memory than it may."""


def main() -> None:
    install_abort_hook()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--grid", type=int, nargs=2)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--limit", type=float, help="MB above the baseline; more ends the job")
    options = parser.parse_args()
    import_module("torch._dynamo")  # which PyTorch's optimizers import: no part of training
    mesh = spatialdl.init_mesh(tuple(options.grid), check=False) if options.grid else None
    baseline = _peak_bytes()
    if options.limit is not None:
        Thread(target=_watch, args=(baseline + options.limit * 2**20,), daemon=True).start()
    found = measure(options, mesh)
    found["memory_mb"] = (_peak_bytes() - baseline) / 2**20
    everybody = [found] if mesh is None else mesh.comm.gather(found)
    if everybody is not None:
        print(json.dumps(_together(everybody)))


def measure(options: argparse.Namespace, mesh: spatialdl.Mesh | None) -> dict[str, Any]:
    """Train `steps` steps after a warm-up; the same images and weights on every side."""
    torch.manual_seed(0)
    model: nn.Module = getattr(models, options.model)(num_classes=CLASSES)
    model = cut(model, (1,), recompute=options.recompute)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = _images(options, mesh)
    labels = _labels(options, mesh)
    seconds = []
    cpu = 0.0
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            cpu = time.process_time()
        if mesh is not None:
            mesh.comm.barrier()
        started = time.perf_counter()
        _train_step(model, optimizer, images, labels, mesh)
        if mesh is not None:
            mesh.comm.barrier()
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": seconds[WARM_UP:],
        "cpu_seconds": (time.process_time() - cpu) / options.steps,
        "threads": torch.get_num_threads(),
    }


def _images(options: argparse.Namespace, mesh: spatialdl.Mesh | None) -> Tensor:
    """Images, of which a rank makes its own box only."""
    size = (options.size, options.size)
    row0, row1, col0, col1 = mesh.box(size) if mesh else (0, size[0], 0, size[1])
    rows = torch.arange(row0, row1).view(-1, 1)
    cols = torch.arange(col0, col1).view(1, -1)
    picture = torch.sin(rows * 0.7 + cols * 0.3) + torch.cos(rows * 0.05 - cols * 0.11)
    images = picture.expand(options.batch, 3, -1, -1).contiguous()
    return spatialdl.from_local(images, mesh, size) if mesh else images


def _labels(options: argparse.Namespace, mesh: spatialdl.Mesh | None) -> Tensor:
    """A class for every image; for a U-Net one for every pixel of the own box."""
    labels = torch.arange(options.batch) % CLASSES
    if options.model != "unet":
        return labels
    size = (options.size, options.size)
    row0, row1, col0, col1 = mesh.box(size) if mesh else (0, size[0], 0, size[1])
    masks = labels.view(-1, 1, 1).repeat(1, row1 - row0, col1 - col0)
    return spatialdl.from_local(masks, mesh, size) if mesh else masks


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
        "host": os.uname().nodename,
    }


def _watch(most: float) -> None:
    """End the process when it takes more than so many bytes."""
    while _peak_bytes() <= most:
        Event().wait(0.05)
    os.write(1, b"over limit\n")
    os._exit(OVER_LIMIT)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
