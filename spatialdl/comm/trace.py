"""Records spans of a rank's time between `start` and `stop`; no overhead otherwise.

Also counts seconds of waiting, from `count` on, at the cost of two clock reads per span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

Item = TypeVar("Item")
Kind = Literal["compute", "halo", "hand-over", "reduce", "data"]

WAITS: tuple[Kind, ...] = ("halo", "hand-over", "reduce", "data")
"""Kinds whose seconds are counted."""


class Span(NamedTuple):
    """Time of one activity of a rank; spans may be nested.

    Attributes:
        start, end: seconds since `start` was called.
        detail: None or a named tuple of numbers and strings.
    """

    kind: Kind
    name: str
    start: float
    end: float
    detail: Any = None


class _Recorder:
    """Recorded spans since a start time.

    Args:
        settle: called before the clock is read at the end of a compute span, so that a GPU has
            finished its queue.
    """

    def __init__(self, settle: Callable[[], object]) -> None:
        self.settle = settle
        self.began = time.perf_counter()
        self.spans: list[Span] = []

    def now(self) -> float:
        return time.perf_counter() - self.began


class _Thread(threading.local):
    depth, began = 0, 0.0


_thread = _Thread()


class _Counter:
    """Seconds of the spans of a kind, nested spans excluded."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        _thread.depth += 1
        if _thread.depth == 1:
            _thread.began = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        _thread.depth -= 1
        if _thread.depth == 0:
            self.seconds += time.perf_counter() - _thread.began


class _State:
    recorder: _Recorder | None = None
    counters: Mapping[Kind, _Counter] | None = None


_NOTHING: AbstractContextManager[None] = nullcontext()


class _Open:
    """An open span."""

    def __init__(
        self,
        recorder: _Recorder,
        kind: Kind,
        name: str,
        detail: Any,
        counter: AbstractContextManager[None],
    ) -> None:
        self._recorder, self._what = recorder, (kind, name)
        self._detail, self._counter = detail, counter

    def __enter__(self) -> None:
        self._counter.__enter__()
        self._start = self._recorder.now()

    def __exit__(self, *raised: Any) -> None:
        self._counter.__exit__(*raised)
        if self._what[0] == "compute":
            self._recorder.settle()
        span = Span(*self._what, self._start, self._recorder.now(), self._detail)
        self._recorder.spans.append(span)


def start(settle: Callable[[], object] = lambda: None) -> None:
    """Start to record; ranks that call it right after a barrier have synchronised clocks."""
    _State.recorder = _Recorder(settle)


def take() -> list[Span]:
    """Spans since the last call, in the order of their ends."""
    if _State.recorder is None:
        return []
    spans, _State.recorder.spans = _State.recorder.spans, []
    return spans


def stop() -> list[Span]:
    """Stop recording; return the spans since the last `take`."""
    spans, _State.recorder = take(), None
    return spans


def enabled() -> bool:
    return _State.recorder is not None


def count() -> None:
    """Start to count seconds of waits."""
    _State.counters = {kind: _Counter() for kind in WAITS}
    _thread.depth = 0


def counted() -> dict[Kind, float]:
    """Seconds of each of `WAITS` since the last call, nested spans counted once."""
    counters = _State.counters or {}
    seconds = {kind: counter.seconds for kind, counter in counters.items()}
    for counter in counters.values():
        counter.seconds = 0.0
    return seconds


def leave_out(seconds: float) -> None:
    """Exclude the last `seconds`, in which another thread had its turn, from the current wait."""
    _thread.began += seconds


def stop_counting() -> None:
    _State.counters = None


def watched() -> bool:
    """Whether waits are recorded or counted."""
    return _State.recorder is not None or _State.counters is not None


def span(kind: Kind, name: str, detail: Any = None) -> AbstractContextManager[None]:
    """Context whose duration is recorded."""
    recorder, counters = _State.recorder, _State.counters
    counter: AbstractContextManager[None] = _NOTHING
    if counters is not None and kind != "compute":
        counter = counters[kind]
    return counter if recorder is None else _Open(recorder, kind, name, detail, counter)


def each(kind: Kind, name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over `items`; each ``next`` is recorded."""
    iterator = iter(items)
    while True:
        with span(kind, name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
