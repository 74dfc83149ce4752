"""Scheduling of work on an executor, by priority; results may add more work."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from spatialdl.slides.batch.executors import BatchExecutor

_LOOK = 0.3  # seconds between calls of `watch` while no result arrives

DIED = "the process that worked on it died (killed, perhaps out of memory)"


@dataclass(order=True)
class Work:
    """A call and its continuation.

    Attributes:
        urgency: the smallest value is scheduled first.
        call: runs on the executor.
        then: takes the result of the call, or its exception, and returns more work.
    """

    urgency: tuple[int, ...]
    call: Callable[[], Any] = field(compare=False)
    then: Callable[[Any], Iterable[Work]] = field(compare=False)


def share(executor: BatchExecutor, works: Iterable[Work], watch: Callable[[], None]) -> None:
    """Execute all work, and the work that its results add.

    If a process dies, each call that was in flight is repeated with no other call in flight. The
    call that kills its process again has `BrokenExecutor` as its result.

    Args:
        executor: executes the calls.
        works: initial work.
        watch: called regularly, to update the progress.
    """
    waiting = list(works)
    heapq.heapify(waiting)
    running: dict[Future[Any], Work] = {}
    suspects: list[Work] = []
    tried = False  # a suspect is in flight, and no other call
    while waiting or running or suspects:
        if suspects and not running:
            suspect, tried = suspects.pop(), True
            running[_submitted(executor, suspect)] = suspect
        while waiting and not (suspects or tried) and len(running) < executor.room:
            work = heapq.heappop(waiting)
            running[_submitted(executor, work)] = work
        done, _ = wait(running, _LOOK, FIRST_COMPLETED)
        broken = False
        for future in done:
            work = running.pop(future)
            error = future.exception()
            if isinstance(error, BrokenExecutor):
                broken = True
                if not tried:
                    suspects.append(work)
                    continue
            for more in work.then(future.result() if error is None else error):
                heapq.heappush(waiting, more)
        if broken:
            suspects.extend(running.values())
            running.clear()
            executor.renew()
        tried = tried and bool(running)
        watch()


def _submitted(executor: BatchExecutor, work: Work) -> Future[Any]:
    try:
        return executor.submit(work.call)
    except BrokenExecutor:  # a process died between two calls
        executor.renew()
        return executor.submit(work.call)
