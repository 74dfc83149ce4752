"""Training step of a ResNet-18 on a large image, streamed or whole, within a memory limit.

The limit is RLIMIT_DATA of the kernel: on private writable memory, including imports and thread
stacks. On a device it is that of PyTorch's allocator, and the second of two steps counts, which
loads no kernels. Prints one line of JSON; with a reason if a step does not fit.
"""

from __future__ import annotations

import argparse
import gc
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
"""Stack size of a thread: the limit counts stacks in full, and the default is 8 MB per tile."""
_LACKS_MEMORY = ("memory", "alloc", "create a primitive", "start new thread")


class Picture:
    """Square image (1, 3, size, size) of float32 in [0, 1), computed on access."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.shape, self._device = (1, 3, size, size), device

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        places = torch.arange(self.shape[2], device=self._device)
        rows, columns = (places[one].float() for one in part[2:])
        slopes = torch.tensor([0.37, 0.83, 0.59], device=self._device).view(1, 3, 1, 1)
        return (rows.view(-1, 1) * slopes).add(columns * 0.71).frac_()


class _Stem(Recomputed, nn.Sequential):
    """The layers up to the first pooling, recomputed in backward."""


def main() -> None:
    options = _parse()
    device = device_of(options.device)
    if options.limit_gb is not None:
        limit(device, int(options.limit_gb * 1e9))
    base = {"base_gb": _resident_gb(device), "base_data_gb": _data()}
    try:
        if device.type != "cpu":
            _step(options, device)
            gc.collect()  # frames of the first imports in it refer to its store
        found = _step(options, device)
    except (RuntimeError, MemoryError) as error:
        if options.limit_gb is None or not lacks_memory(error):
            raise
        found = {"fits": False, "why": (str(error) or type(error).__name__).splitlines()[0]}
    print(json.dumps({**base, **found}), flush=True)
    os._exit(0)  # threads without memory cannot be joined


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--grid", type=int, help="streamed, with this number of tiles per side")
    parser.add_argument("--live-gb", type=float, help="limit of streamed tensors")
    parser.add_argument("--limit-gb", type=float, help="limit of the process")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--recompute-stem", action="store_true")
    parser.add_argument("--store")
    add_device(parser)
    return parser.parse_args()


def lacks_memory(error: BaseException) -> bool:
    """Whether an error is out of memory: PyTorch's allocator, oneDNN, Python or a thread stack."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(word in words for word in _LACKS_MEMORY)


def limit(device: torch.device, most: int) -> None:
    """Limit memory to `most` bytes, of this process or of PyTorch's allocator on a device.

    Raises:
        ValueError: the device does not support a limit.
    """
    if device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        raise ValueError(f"memory of {device.type} cannot be limited: remove --limit-gb")
    module.set_per_process_memory_fraction(min(1.0, most / module.mem_get_info()[1]))


def _step(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run forward, loss and backward of one step."""
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
        "needed_gb": _needed_gb(device),
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


def _needed_gb(device: torch.device) -> float:
    """Peak memory without what PyTorch's allocator keeps in its cache, in GB."""
    if device.type == "cpu":
        return _resident_gb(device)
    return float(torch.get_device_module(device).max_memory_allocated() / 1e9)


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
    """Memory that RLIMIT_DATA counts, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024 / 1e9


if __name__ == "__main__":
    main()
