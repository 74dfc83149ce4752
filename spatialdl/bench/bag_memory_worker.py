"""Rank of the `bag_memory` benchmark: training steps on one slide.

Rank 0 prints one line of JSON: the peak memory of the largest rank, minus that of the imports, and
seconds of the last step.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import spatialdl
from spatialdl import models
from spatialdl.bags import EndToEnd
from spatialdl.comm.abort import install_abort_hook
from spatialdl.torch_internals import import_compiler
from spatialdl.training.peak_memory import peak_memory_mb

STEPS = 2


def noise(start: int, stop: int, side: int, seed: int = 0) -> Tensor:
    """Noise tiles (stop - start, 3, side, side); each depends on its index and the seed only."""
    tiles = [
        torch.rand(3, side, side, generator=torch.Generator().manual_seed((seed << 32) + number))
        for number in range(start, stop)
    ]
    return torch.stack(tiles) if tiles else torch.empty(0, 3, side, side)


def main() -> None:
    install_abort_hook()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    for name in ("tiles", "side", "slice", "width", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    import_compiler()  # optimizers import it; counts as imports, not training
    mesh = spatialdl.init_mesh((options.ranks,), check=False)
    device = torch.device("cpu")
    baseline = peak_memory_mb(device)
    torch.manual_seed(0)
    e2e = EndToEnd(
        models.resnet18(num_classes=options.width),
        models.abmil(in_channels=options.width, width=32, hidden=32, dropout=0.0),
        mesh,
        options.slice,
        options.mode,
        frozen_norm=True,
        progress=False,
    )
    optimizer = torch.optim.SGD(e2e.parameters(), lr=0.01, momentum=0.9)
    seconds = 0.0
    for _ in range(STEPS):
        mesh.comm.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        tiles = partial(noise, side=options.side)
        e2e.step(tiles, torch.tensor([1]), F.cross_entropy, count=options.tiles)
        optimizer.step()
        seconds = time.perf_counter() - began
    gathered = mesh.comm.gather((peak_memory_mb(device) - baseline, seconds))
    if gathered is not None:
        memory, times = zip(*gathered, strict=True)
        print(json.dumps({"memory_mb": max(memory), "seconds": max(times)}))


if __name__ == "__main__":
    main()
