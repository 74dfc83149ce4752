"""Prefetch of tiles by threads, in order, while the encoder computes.

Decoders and resampling release the GIL, so threads suffice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Full, Queue

from spatialdl.features.sources import SlideTiles, TilePiece
from spatialdl.slides.batch.report import TilingReport

_POLL_S = 0.1  # interval at which a waiting thread checks whether to stop

Opened = SlideTiles | TilingReport
"""A slide to read, or the report of a slide without tiles to read."""


@dataclass(frozen=True)
class Read:
    """A piece of a slide, or the error of reading it; neither marks the end of the slide."""

    bag: SlideTiles
    piece: TilePiece | None = None
    problem: Exception | None = None


class ReadAhead:
    """A reader that prefetches slide after slide.

    ::

        with ReadAhead(opened, threads=4) as reading:
            for one in reading:  # a `TilingReport`, or a `Read`

    Args:
        opened: returns the next slide, None at the end; called in a separate thread.
        threads: number of reading threads.
    """

    def __init__(self, opened: Callable[[], Opened | None], threads: int) -> None:
        self._opened = opened
        self._queue: Queue[
            TilingReport | tuple[SlideTiles, Future[TilePiece] | None] | Exception | None
        ] = Queue(2 * threads + 2)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(threads, "reading")
        self._thread = threading.Thread(target=self._plan, name="planning", daemon=True)

    def __enter__(self) -> ReadAhead:
        """Start the threads."""
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the threads; pending reads are cancelled."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[TilingReport | Read]:
        """Yield results in order."""
        while (one := self._queue.get()) is not None:
            if isinstance(one, Exception):
                raise one
            if isinstance(one, TilingReport):
                yield one
                continue
            bag, future = one
            if future is None:
                yield Read(bag)
                continue
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield Read(bag, None, error) if error is not None else Read(bag, future.result())

    def _plan(self) -> None:
        try:
            while not self._stopped.is_set() and (found := self._opened()) is not None:
                if isinstance(found, TilingReport):
                    self._put(found)
                    continue
                for first, last in found.pieces():
                    self._put_read(found, first, last)
                self._put((found, None))
            self._put(None)
        except Exception as error:  # re-raised in the consumer
            self._put(error)

    def _put_read(self, bag: SlideTiles, first: int, last: int) -> None:
        if not self._stopped.is_set():
            try:
                self._put((bag, self._pool.submit(bag.read, first, last)))
            except RuntimeError:  # the pool was shut down concurrently
                if not self._stopped.is_set():
                    raise

    def _put(
        self, one: TilingReport | tuple[SlideTiles, Future[TilePiece] | None] | Exception | None
    ) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(one, timeout=_POLL_S)
            except Full:
                continue
            return
