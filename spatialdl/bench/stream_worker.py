"""One training step of a ResNet-18 on a large image, streamed or whole, within a limit of memory.

The limit is the kernel's: RLIMIT_DATA, on private memory that can be written to, with what the
imports and stacks of threads take. On a device it is that of PyTorch's allocator, and the second
of two steps counts, which loads no kernels. Prints one line of JSON; a step that does not fit says
why.
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
from spatialdl.bench.device import add_device
from spatialdl.comm.device_path import device_of
from spatialdl.spatial.recompute import Recomputed
from spatialdl.streaming.streamed import memory_of
from spatialdl.training.peak_memory import peak_memory_mb

CLASSES = 10
STACK = 2 * 2**20
"""Bytes of a thread: the limit counts them whole, the usual 8 MB for each tile would fill it."""
_LACKS_MEMORY = ("memory", "alloc", "create a primitive", "start new thread")


class Picture:
    """A square image (1, 3, size, size) of float32 in [0, 1); parts of it are drawn when read."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.shape, self._device = (1, 3, size, size), device

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        places = torch.arange(self.shape[2], device=self._device)
        rows, columns = (places[one].float() for one in part[2:])
        slopes = torch.tensor([0.37, 0.83, 0.59], device=self._device).view(1, 3, 1, 1)
        return (rows.view(-1, 1) * slopes).add(columns * 0.71).frac_()


class _Stem(Recomputed, nn.Sequential):
    """The layers up to the first pooling, whose forward runs again in backward."""


def main() -> None:
    options = _parse()
    device = device_of(options.device)
    if options.limit_gb is not None:
        limit(device, int(options.limit_gb * 1e9))
    base = {"base_gb": _resident_gb(device), "base_data_gb": _data()}
    try:
        if device.type != "cpu":
            _step(options, device)
        found = _step(options, device)
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
    add_device(parser)
    return parser.parse_args()


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ended a step: of PyTorch's allocator, oneDNN, Python or a thread's stack."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(word in words for word in _LACKS_MEMORY)


def limit(device: torch.device, most: int) -> None:
    """Have more than so many bytes refused: of this process, or of what PyTorch takes on a device.

    Raises:
        ValueError: the device has no such limit.
    """
    if device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        raise ValueError(f"memory of {device.type} cannot be limited: leave --limit-gb out")
    module.set_per_process_memory_fraction(min(1.0, most / module.mem_get_info()[1]))


def _step(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Forward, loss and backward of the first step."""
    threading.stack_size(STACK)
    torch.manual_seed(0)
    model: nn.Module = models.resnet18(num_classes=CLASSES)
    if options.recompute_stem:
        layers = list(model.children())
        model = nn.Sequential(_Stem(*layers[:4]), *layers[4:])
    model, image = model.to(device), Picture(options.size, device)
    _wait(device)
    began, cpu = time.perf_counter(), time.process_time()
    with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
        output = _forward(model, image, options)
        loss = F.cross_entropy(output.float(), torch.tensor([1], device=device))
    _wait(device)
    forward = time.perf_counter() - began
    memory = None if options.grid is None else memory_of(output)
    loss.backward()  # type: ignore[no-untyped-call]
    _wait(device)
    found: dict[str, Any] = {
        "fits": True,
        "seconds": time.perf_counter() - began,
        "forward_seconds": forward,
        "cpu_seconds": time.process_time() - cpu,
        "resident_gb": _resident_gb(device),
        "loss": float(loss.detach()),
    }
    if memory is not None:
        found["live_gb"] = memory.peak / 1e9
        if memory.store is not None:
            store = memory.store
            sizes = {"written": store.written, "read": store.read, "stored": store.peak}
            found |= {f"{name}_gb": size / 1e9 for name, size in sizes.items()}
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _resident_gb(device: torch.device) -> float:
    if device.type == "cpu":
        return peak_memory_mb(device) * 2**20 / 1e9
    return float(torch.get_device_module(device).max_memory_reserved() / 1e9)


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
