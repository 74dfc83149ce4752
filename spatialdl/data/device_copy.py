"""Batches that are on their way to the device while the one before them is computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spatialdl.data.batches import Slice

Arrived = Callable[[], list[Slice]]


class DeviceCopy:
    """Begins to copy batches to a device, from any thread.

    An accelerator copies from pinned memory in a stream of its own, so that neither this process
    nor what the device computes waits for it. On a CPU batches are left as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def begin(self, batch: list[Slice]) -> Arrived:
        """Call what this returns where the batch is needed, on the stream that needs it."""
        stream = self._stream
        if stream is None:
            return lambda: batch
        with stream:
            copied = [one.map(self._copy) for one in batch]
            done = stream.record_event()

        def arrived() -> list[Slice]:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(done)
            for tensor in _tensors(copied):
                # its memory belongs to the other stream, which must not take it back too early
                tensor.record_stream(current)
            return copied

        return arrived

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _tensors(batch: list[Slice]) -> Iterator[Tensor]:
    return (tensor for one in batch for tensor in one.tensors())
