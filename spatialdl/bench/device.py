"""Where the ranks of a benchmark compute, and seconds by the clock of that device."""

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
    text = "cpu, auto (the accelerator that PyTorch sees, else cpu) or its kind, such as cuda"
    parser.add_argument("--device", default="cpu", help=f"{text} (%(default)s)")


def worker_command(name: str, ranks: int, options: Namespace) -> list[str]:
    """The command that runs a benchmark's worker on ranks, each on its device.

    Args:
        name: of the worker's module, which finds the options by `worker_options`.
        options: with ``device``.
    """
    start = [*mpiexec_command(ranks), sys.executable, "-m", "spatialdl.bench.device"]
    return [*start, name, json.dumps(vars(options))]


def worker_options() -> Namespace:
    """The options of `worker_command`, in the worker."""
    return Namespace(**json.loads(sys.argv[1]))


def take_device(name: str) -> torch.device:
    """The device of this rank, the current one from now on; called before ranks are connected.

    Rank i of a machine takes device i. Where there are more ranks than devices, some share one.

    Raises:
        ValueError: if PyTorch sees no such device.
    """
    info = launched()
    if name != "cpu" and info is not None and torch.accelerator.is_available():
        paths.take_device(info.local_rank % torch.accelerator.device_count())
    return device_of(name)


def describe(device: torch.device) -> str:
    """The device, and how tensors travel between those of several ranks."""
    if device.type == "cpu":
        return CPU
    name = str(torch.get_device_module(device).get_device_name(device))
    path = device_path()
    return name if launched() is None else f"{name}, tensors by {path.name} ({path.reason})"


class Stopwatch:
    """Seconds of work on a device, without those until the host hears that it has ended.

    On an accelerator they are taken between two of its own events in the current stream, on a CPU
    by the clock of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0.0
        self._first: torch.Event | None = None

    def start(self) -> None:
        """Begin, once the device has done all that it was given before."""
        if self._device.type == "cpu":
            self._began = time.perf_counter()
            return
        torch.accelerator.synchronize(self._device)
        self._first = self._event()

    def stop(self) -> float:
        """Seconds since `start`, once the device has done all that it was given since."""
        if self._first is None:
            return time.perf_counter() - self._began
        last = self._event()
        torch.accelerator.synchronize(self._device)
        return float(self._first.elapsed_time(last)) / 1000

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


if __name__ == "__main__":  # takes the device before a worker's imports initialise MPI
    del sys.argv[0]
    take_device(json.loads(sys.argv[1])["device"])
    runpy.run_module(f"spatialdl.bench.{sys.argv[0]}", run_name="__main__", alter_sys=True)
