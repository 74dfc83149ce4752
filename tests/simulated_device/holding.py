"""Streams that tests hold back, so that what is queued in them has certainly not run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

PATIENCE_S = 30  # or a test that fails would hang


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[threading.Event]:
    """Hold a stream, the current one by default, until the end or until the event is set."""
    stream = torch.sim.current_stream() if stream is None else stream
    gate = threading.Event()

    def hold() -> None:
        if not gate.wait(PATIENCE_S):
            raise TimeoutError("the host waited for a stream that a test holds back")

    torch.sim.enqueue(hold, stream)
    try:
        yield gate
    finally:
        gate.set()
