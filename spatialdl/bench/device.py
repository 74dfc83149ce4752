"""Devices of the ranks of a benchmark, and a stopwatch for them."""

from __future__ import annotations

import json
import runpy
import sys
import time
from argparse import ArgumentParser, Namespace

import torch

from spatialdl.bench.results import CPU
from spatialdl.comm import device_path as paths
from spatialdl.comm.device_path import device_of, device_path
from spatialdl.comm.launch import launched, mpiexec_command


def add_device(parser: ArgumentParser) -> None:
    """Add the option ``--device``."""
    text = "cpu, auto (accelerator if available, otherwise cpu), or a device type such as cuda"
    parser.add_argument("--device", default="cpu", help=f"{text} (%(default)s)")


def worker_command(name: str, ranks: int, options: Namespace) -> list[str]:
    """Command that runs a benchmark's worker on ranks, each on its device.

    Args:
        name: module of the worker, which reads the options by `worker_options`.
        ranks: number of ranks.
        options: options, including ``device``.
    """
    start = [*mpiexec_command(ranks), sys.executable, "-m", "spatialdl.bench.device"]
    return [*start, name, json.dumps(vars(options))]


def worker_options() -> Namespace:
    """Parse the options of `worker_command`, in the worker."""
    return Namespace(**json.loads(sys.argv[1]))


def take_device(name: str) -> torch.device:
    """Set and return the current device of this rank; to be called before MPI starts.

    Rank i of a machine uses device i, modulo the number of devices.

    Raises:
        ValueError: PyTorch has no such device.
    """
    info = launched()
    if name != "cpu" and info is not None and torch.accelerator.is_available():
        paths.take_device(info.local_rank % torch.accelerator.device_count())
    return device_of(name)


def describe(device: torch.device) -> str:
    """Name of the device, and the transfer path between ranks."""
    if device.type == "cpu":
        return CPU
    name = str(torch.get_device_module(device).get_device_name(device))
    path = device_path()
    return name if launched() is None else f"{name}, tensors by {path.name} ({path.reason})"


class Stopwatch:
    """Stopwatch for work on a device, without the latency of synchronisation.

    It uses events in the current stream on an accelerator, and the host's clock on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0.0
        self._first: torch.Event | None = None

    def start(self) -> None:
        """Start after all previous work of the device."""
        if self._device.type == "cpu":
            self._began = time.perf_counter()
            return
        torch.accelerator.synchronize(self._device)
        self._first = self._event()

    def stop(self) -> float:
        """Seconds since `start`, after all work of the device since then."""
        if self._first is None:
            return time.perf_counter() - self._began
        last = self._event()
        torch.accelerator.synchronize(self._device)
        return float(self._first.elapsed_time(last)) / 1000

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


if __name__ == "__main__":  # sets the device before the imports of a worker initialise MPI
    del sys.argv[0]
    take_device(json.loads(sys.argv[1])["device"])
    runpy.run_module(f"spatialdl.bench.{sys.argv[0]}", run_name="__main__", alter_sys=True)
