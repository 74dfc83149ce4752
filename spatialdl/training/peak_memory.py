"""The memory that a process has taken at most, and that its device says is in use."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def peak_memory_mb(device: torch.device) -> float:
    """Most memory so far: of an accelerator's own, resident on a CPU; in MB (2**20 bytes)."""
    if device.type != "cpu":
        most: int = torch.get_device_module(device).max_memory_allocated(device)
        return most / 2**20
    return _resident_kb() / 1024


def _resident_kb() -> int:
    """Linux counts a process's parent in the other figure: what it had when it started this one."""
    told = Path("/proc/self/status")
    lines = told.read_text().splitlines() if told.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_memory_mb(device: torch.device) -> float | None:
    """What an accelerator itself says is in use now, by all its processes, in MB (2**20 bytes).

    Beside tensors that is the context, NCCL, what PyTorch keeps for later and what lies between.
    None for a CPU.
    """
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module(device).mem_get_info(device)
    used: int = total - free
    return used / 2**20
