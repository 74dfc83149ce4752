"""Peak memory of a process and memory in use on its device."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (2**20 bytes): allocated on an accelerator, resident on a CPU."""
    if device.type != "cpu":
        peak: int = torch.get_device_module(device).max_memory_allocated(device)
        return peak / 2**20
    return _resident_kb() / 1024


def _resident_kb() -> int:
    """Peak resident memory in kB.

    ``ru_maxrss`` on Linux includes the memory of the parent process at the fork.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_memory_mb(device: torch.device) -> float | None:
    """Memory in use on an accelerator by all processes, in MB (2**20 bytes); None for a CPU.

    Includes the context, NCCL buffers, PyTorch's cache and fragmentation.
    """
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module(device).mem_get_info(device)
    used: int = total - free
    return used / 2**20
