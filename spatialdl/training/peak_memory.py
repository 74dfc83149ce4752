"""The most memory that a process has taken."""

from __future__ import annotations

import resource

import torch


def peak_memory_mb(device: torch.device) -> float:
    """Most memory so far: of an accelerator's own, resident on a CPU; in MB (2**20 bytes)."""
    if device.type != "cpu":
        most: int = torch.get_device_module(device).max_memory_allocated(device)
        return most / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
