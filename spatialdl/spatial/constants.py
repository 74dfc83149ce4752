"""Cached tensors that depend on sizes only, created once and copied to a device once.

A copy from the host synchronises with the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def on(table: Tensor, device: torch.device) -> Tensor:
    """A read-only table of the host on a device; copied at the first call."""
    if table.device == device:
        return table
    copies: dict[torch.device, Tensor] = _copies.setdefault(table, {})  # type: ignore[no-untyped-call]
    if device not in copies:
        with torch.inference_mode(False):
            copies[device] = table.to(device)
    return copies[device]


@lru_cache(maxsize=1024)
def constant(value: float, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cached read-only tensor (size,) filled with `value`."""
    with torch.inference_mode(False):
        return torch.full((size,), value, dtype=dtype, device=device)
