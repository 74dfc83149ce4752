"""Tensors that depend on sizes only: made once, and copied to a device once.

A copy from the host waits for all that the device has still to do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def on(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host, which nobody writes to, on a device; copied at the first time."""
    if table.device == device:
        return table
    copies: dict[torch.device, Tensor] = _copies.setdefault(table, {})  # type: ignore[no-untyped-call]
    if device not in copies:
        with torch.inference_mode(False):
            copies[device] = table.to(device)
    return copies[device]


@lru_cache(maxsize=1024)
def constant(value: float, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size,) of one value, which nobody writes to; made once, as these are small operations."""
    with torch.inference_mode(False):
        return torch.full((size,), value, dtype=dtype, device=device)
