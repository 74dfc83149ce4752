"""Handing out work: the most urgent first, more of it as results come in."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from spatialdl.slides.batch.executors import BatchExecutor

_LOOK = 0.3  # seconds after which whoever watches is told that time goes by

DIED = "the process that worked on it died (killed, perhaps for want of memory)"


@dataclass(order=True)
class Work:
    """A call and what follows from it.

    Attributes:
        urgency: the smallest goes first.
        call: done by the crew.
        then: takes what it returned, or the exception that it raised, and gives more work.
    """

    urgency: tuple[int, ...]
    call: Callable[[], Any] = field(compare=False)
    then: Callable[[Any], Iterable[Work]] = field(compare=False)


def share(crew: BatchExecutor, works: Iterable[Work], watch: Callable[[], None]) -> None:
    """Have all work done, and all that follows from it.

    Where a process dies, each call that was under way is done again with nothing beside it; the
    one that kills its process then ends with `BrokenExecutor` as its result.

    Args:
        crew: does the calls.
        works: to begin with.
        watch: called every now and then.
    """
    waiting = list(works)
    heapq.heapify(waiting)
    running: dict[Future[Any], Work] = {}
    suspects: list[Work] = []
    tried = False  # a suspect is under way, and nothing else
    while waiting or running or suspects:
        if suspects and not running:
            suspect, tried = suspects.pop(), True
            running[_submitted(crew, suspect)] = suspect
        while waiting and not (suspects or tried) and len(running) < crew.room:
            work = heapq.heappop(waiting)
            running[_submitted(crew, work)] = work
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
            crew.renew()
        tried = tried and bool(running)
        watch()


def _submitted(crew: BatchExecutor, work: Work) -> Future[Any]:
    try:
        return crew.submit(work.call)
    except BrokenExecutor:  # a process died between two calls
        crew.renew()
        return crew.submit(work.call)
