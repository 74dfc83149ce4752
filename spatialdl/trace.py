"""Where the time goes: spans that a rank records between `start` and `stop`; free otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

Item = TypeVar("Item")
Kind = Literal["compute", "halo", "hand-over", "reduce", "data"]


class Span(NamedTuple):
    """A time in which a rank did one thing; spans may lie within each other.

    Attributes:
        start, end: seconds since `start` was called.
        detail: more about it, None or a named tuple of numbers and strings.
    """

    kind: Kind
    name: str
    start: float
    end: float
    detail: Any = None


class _Recorder:
    """Spans since some moment.

    Args:
        settle: called before a clock is read at the end of a span of computing, so that a GPU
            has done what it was given.
    """

    def __init__(self, settle: Callable[[], object]) -> None:
        self.settle = settle
        self.began = time.perf_counter()
        self.spans: list[Span] = []

    def now(self) -> float:
        return time.perf_counter() - self.began


class _State:
    recorder: _Recorder | None = None


_NOTHING: AbstractContextManager[None] = nullcontext()


class _Open:
    """A span that has not ended."""

    def __init__(self, recorder: _Recorder, kind: Kind, name: str, detail: Any) -> None:
        self._recorder, self._what = recorder, (kind, name)
        self._detail = detail

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._what[0] == "compute":
            self._recorder.settle()
        span = Span(*self._what, self._start, self._recorder.now(), self._detail)
        self._recorder.spans.append(span)


def start(settle: Callable[[], object] = lambda: None) -> None:
    """Record from now on; ranks that call it right after a barrier have one clock."""
    _State.recorder = _Recorder(settle)


def take() -> list[Span]:
    """What was recorded since the last call, in the order in which it ended."""
    if _State.recorder is None:
        return []
    spans, _State.recorder.spans = _State.recorder.spans, []
    return spans


def stop() -> list[Span]:
    """Record no more; what was recorded since the last `take`."""
    spans, _State.recorder = take(), None
    return spans


def enabled() -> bool:
    return _State.recorder is not None


def span(kind: Kind, name: str, detail: Any = None) -> AbstractContextManager[None]:
    """What is done inside is recorded."""
    recorder = _State.recorder
    return _NOTHING if recorder is None else _Open(recorder, kind, name, detail)


def each(kind: Kind, name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; what it takes to get each of them is recorded."""
    iterator = iter(items)
    while True:
        with span(kind, name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
