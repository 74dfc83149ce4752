"""Where the ranks of a benchmark compute, and seconds by the clock of that device."""

from __future__ import annotations

import runpy
import sys
import time
from argparse import ArgumentParser

import torch

from spatialdl.bench.results import CPU
from spatialdl.comm import device_path as paths
from spatialdl.comm.device_path import device_of, device_path
from spatialdl.comm.launch import launched


def add_device(parser: ArgumentParser) -> None:
    """Add the option ``--device``."""
    text = "cpu, auto (the accelerator that PyTorch sees, else cpu) or its kind, such as cuda"
    parser.add_argument("--device", default="cpu", help=f"{text} (%(default)s)")


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


if __name__ == "__main__":  # a worker whose imports initialise MPI: `MODULE --device NAME ...`
    del sys.argv[0]
    take_device(sys.argv[sys.argv.index("--device") + 1])
    runpy.run_module(f"spatialdl.bench.{sys.argv[0]}", run_name="__main__", alter_sys=True)
