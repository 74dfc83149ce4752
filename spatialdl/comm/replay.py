"""Records data received from other ranks in a forward, so that recomputation needs no messages.

Activation checkpointing recomputes parts of the forward during backward. If that communicated,
ranks would have to start it together and would wait for each other twice. So the first run records
received data on a tape, and the second run reads it from there.

Tapes are per thread: on a GPU, backward runs in a separate thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from torch import Tensor

from spatialdl.comm.communicator import Pending

Mode = Literal["record", "replay"]
Value = TypeVar("Value", Tensor, int)


class ReplayTape:
    """Received data, in the order of requests."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def record(self) -> Running:
        """Context that records received data."""
        return Running(self, "record")

    def replay(self) -> Running:
        """Context that returns recorded data without communication."""
        return Running(self, "replay")


class Running:
    """A tape while it records or replays; can be entered repeatedly."""

    def __init__(self, tape: ReplayTape, mode: Mode) -> None:
        self.tape, self.mode = tape, mode
        self.around: Running | None = None
        self._place = 0

    def __enter__(self) -> None:
        self.around, _thread.running = _thread.running, self
        self._place = 0
        if self.mode == "record":
            self.tape.kept.clear()

    def __exit__(self, *raised: object) -> None:
        _thread.running, self.around = self.around, None

    def next_place(self) -> int:
        self._place += 1
        if self.mode == "record":
            self.tape.kept.append(None)
        return self._place - 1


class _Thread(threading.local):
    running: Running | None = None


_thread = _Thread()


def replaying() -> bool:
    """Whether a part of the network is recomputed."""
    running = _thread.running
    while running is not None:
        if running.mode == "replay":
            return True
        running = running.around
    return False


def is_active() -> bool:
    """Whether a tape is recording or replaying."""
    return _thread.running is not None


@contextmanager
def aside() -> Iterator[None]:
    """Bypass the tape, for a result that the caller caches."""
    around, _thread.running = _thread.running, None
    try:
        yield
    finally:
        _thread.running = around


def once(compute: Callable[[], Value]) -> Value:
    """Result of `compute`; in recomputation its recorded result, without a call."""
    return _once(_thread.running, compute)


def _once(running: Running | None, compute: Callable[[], Value]) -> Value:
    if running is None:
        return compute()
    place = running.next_place()
    if running.mode == "replay":
        return _copied(running.tape.kept[place])  # type: ignore[return-value]
    value = _once(running.around, compute)  # nested recomputation
    running.tape.kept[place] = _copied(value)
    return value


def _copied(value: object) -> object:
    """Copy of a value, as the caller may modify it."""
    return value.clone() if isinstance(value, Tensor) else value


def exchange_once(start: Callable[[], Pending], receives: Sequence[Tensor]) -> Pending:
    """Start an exchange that fills `receives`; in recomputation fill them from the tape."""
    return _exchange_once(_thread.running, start, receives)


def _exchange_once(
    running: Running | None, start: Callable[[], Pending], receives: Sequence[Tensor]
) -> Pending:
    if running is None:
        return start()
    place = running.next_place()
    if running.mode == "replay":
        return _Replayed(running.tape, place, receives)
    return _Recorded(running.tape, place, receives, _exchange_once(running.around, start, receives))


class _Recorded:
    """A pending exchange whose received data are recorded."""

    def __init__(
        self, tape: ReplayTape, place: int, receives: Sequence[Tensor], pending: Pending
    ) -> None:
        self._tape, self._place, self._receives = tape, place, receives
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self._tape.kept[self._place] = [view.detach().clone() for view in self._receives]
        self._receives = ()


class _Replayed:
    """An exchange in recomputation."""

    def __init__(self, tape: ReplayTape, place: int, receives: Sequence[Tensor]) -> None:
        self._tape, self._place, self._receives = tape, place, receives

    def wait(self) -> None:
        kept = self._tape.kept[self._place]
        if not isinstance(kept, list):
            raise RuntimeError(f"exchange {self._place} was not waited for in the first run")
        for view, arrival in zip(self._receives, kept, strict=True):
            if view.shape != arrival.shape:
                raise RuntimeError(
                    f"recomputation expects {tuple(view.shape)}, but the first run received "
                    f"{tuple(arrival.shape)}: it must execute the same operations"
                )
            view.copy_(arrival)
        self._receives = ()
