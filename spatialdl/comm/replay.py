"""What came from other ranks while a part of a network ran, kept so that it can run again alone.

Activation checkpointing runs parts of the forward a second time, during backward. If that talked,
ranks would have to come to it together and would wait for each other twice. So the first run
writes what arrives on a tape, and the second reads it from there.

The tape in use belongs to a thread: on a GPU, backward runs in a thread of its own.
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
    """What arrived, in the order in which it was asked for."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def record(self) -> Running:
        """A context in which what arrives is kept."""
        return Running(self, "record")

    def replay(self) -> Running:
        """A context in which nobody is asked, and what was kept arrives again."""
        return Running(self, "replay")


class Running:
    """A tape while it records or replays; may be entered again when it was left."""

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
    """Whether a part of the network runs for the second time."""
    running = _thread.running
    while running is not None:
        if running.mode == "replay":
            return True
        running = running.around
    return False


def taped() -> bool:
    """Whether a tape is in use, recording or replaying."""
    return _thread.running is not None


@contextmanager
def aside() -> Iterator[None]:
    """Talk as if no tape were running: for what is asked once and kept by whoever asked."""
    around, _thread.running = _thread.running, None
    try:
        yield
    finally:
        _thread.running = around


def once(ask: Callable[[], Value]) -> Value:
    """What `ask` gives; in a second run, what it gave in the first, without asking."""
    return _once(_thread.running, ask)


def _once(running: Running | None, ask: Callable[[], Value]) -> Value:
    if running is None:
        return ask()
    place = running.next_place()
    if running.mode == "replay":
        return _copied(running.tape.kept[place])  # type: ignore[return-value]
    value = _once(running.around, ask)  # a part within a part that runs again
    running.tape.kept[place] = _copied(value)
    return value


def _copied(value: object) -> object:
    """Whoever asked may write into what he got."""
    return value.clone() if isinstance(value, Tensor) else value


def exchange_once(start: Callable[[], Pending], receives: Sequence[Tensor]) -> Pending:
    """Start an exchange that fills `receives`; in a second run fill them from the tape."""
    return _exchange_once(_thread.running, start, receives)


def _exchange_once(
    running: Running | None, start: Callable[[], Pending], receives: Sequence[Tensor]
) -> Pending:
    if running is None:
        return start()
    place = running.next_place()
    if running.mode == "replay":
        return _Arrived(running.tape, place, receives)
    return _Kept(running.tape, place, receives, _exchange_once(running.around, start, receives))


class _Kept:
    """An exchange under way whose arrivals go on a tape."""

    def __init__(
        self, tape: ReplayTape, place: int, receives: Sequence[Tensor], pending: Pending
    ) -> None:
        self._tape, self._place, self._receives = tape, place, receives
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self._tape.kept[self._place] = [view.detach().clone() for view in self._receives]
        self._receives = ()


class _Arrived:
    """An exchange of a second run."""

    def __init__(self, tape: ReplayTape, place: int, receives: Sequence[Tensor]) -> None:
        self._tape, self._place, self._receives = tape, place, receives

    def wait(self) -> None:
        kept = self._tape.kept[self._place]
        if not isinstance(kept, list):
            raise RuntimeError(f"what arrived as number {self._place} was never waited for")
        for view, arrival in zip(self._receives, kept, strict=True):
            if view.shape != arrival.shape:
                raise RuntimeError(
                    f"a second run asks for {tuple(view.shape)} where the first had "
                    f"{tuple(arrival.shape)}: it must do what the first did"
                )
            view.copy_(arrival)
        self._receives = ()
