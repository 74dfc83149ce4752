"""One training step of a ResNet-18 on a large image, streamed or whole, within a limit of memory.

The limit is the kernel's: RLIMIT_DATA, on private memory that can be written to, with what the
imports and stacks of threads take. Prints one line of JSON; a step that does not fit says why.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl import models
from spatialdl.spatial.recompute import Recomputed
from spatialdl.streaming.streamed import memory_of
from spatialdl.training.peak_memory import peak_memory_mb

CLASSES = 10
STACK = 2 * 2**20
"""Bytes of a thread: the limit counts them whole, the usual 8 MB for each tile would fill it."""
_LACKS_MEMORY = ("memory", "alloc", "create a primitive", "start new thread")


class Picture:
    """A square image (1, 3, size, size) of float32 in [0, 1); parts of it are drawn when read."""

    def __init__(self, size: int) -> None:
        self.shape = (1, 3, size, size)

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        rows, columns = (torch.arange(self.shape[2])[one].float() for one in part[2:])
        slopes = torch.tensor([0.37, 0.83, 0.59]).view(1, 3, 1, 1)
        return (rows.view(-1, 1) * slopes).add(columns * 0.71).frac_()


class _Stem(Recomputed, nn.Sequential):
    """The layers up to the first pooling, whose forward runs again in backward."""


def main() -> None:
    options = _parse()
    if options.limit_gb is not None:
        most = int(options.limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    base = {"base_gb": peak_memory_mb(torch.device("cpu")) * 2**20 / 1e9, "base_data_gb": _data()}
    try:
        found = _step(options)
    except (RuntimeError, MemoryError) as error:
        if options.limit_gb is None or not lacks_memory(error):
            raise
        found = {"fits": False, "why": (str(error) or type(error).__name__).splitlines()[0]}
    print(json.dumps({**base, **found}), flush=True)
    os._exit(0)  # threads that lack memory cannot be waited for


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--grid", type=int, help="streamed, in so many tiles a side")
    parser.add_argument("--live-gb", type=float, help="limit of streamed tensors")
    parser.add_argument("--limit-gb", type=float, help="of the process")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--recompute-stem", action="store_true")
    parser.add_argument("--store")
    return parser.parse_args()


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ended a step: of PyTorch's allocator, oneDNN, Python or a thread's stack."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(word in words for word in _LACKS_MEMORY)


def _step(options: argparse.Namespace) -> dict[str, Any]:
    """Forward, loss and backward of the first step."""
    threading.stack_size(STACK)
    torch.manual_seed(0)
    model: nn.Module = models.resnet18(num_classes=CLASSES)
    if options.recompute_stem:
        layers = list(model.children())
        model = nn.Sequential(_Stem(*layers[:4]), *layers[4:])
    image = Picture(options.size)
    began, cpu = time.perf_counter(), time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bfloat16"):
        output = _forward(model, image, options)
        loss = F.cross_entropy(output.float(), torch.tensor([1]))
    forward = time.perf_counter() - began
    memory = None if options.grid is None else memory_of(output)
    loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {
        "fits": True,
        "seconds": time.perf_counter() - began,
        "forward_seconds": forward,
        "cpu_seconds": time.process_time() - cpu,
        "resident_gb": peak_memory_mb(torch.device("cpu")) * 2**20 / 1e9,
        "loss": float(loss.detach()),
    }
    if memory is not None:
        found["live_gb"] = memory.peak / 1e9
        if memory.store is not None:
            store = memory.store
            sizes = {"written": store.written, "read": store.read, "stored": store.peak}
            found |= {f"{name}_gb": size / 1e9 for name, size in sizes.items()}
    return found


def _forward(model: nn.Module, image: Picture, options: argparse.Namespace) -> Tensor:
    if options.grid is None:
        output: Tensor = model(image[:, :, :, :])
        return output
    return spatialdl.stream(  # type: ignore[no-any-return]
        model,
        image,
        (options.grid, options.grid),
        limit_gb=options.live_gb,
        store=options.store,
    )


def _data() -> float:
    """What the limit counts, now, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024 / 1e9


if __name__ == "__main__":
    main()
