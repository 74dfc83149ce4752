"""The process that copies shards to the disk of a node, one for all ranks there.

It gets an `Order` as a line of JSON on its standard input, tells what happens by lines of JSON on
its standard output, and ends, after cleaning up, when its input ends: however the job ended. So it
takes no notice of the signals that a launcher or a terminal sends to everybody.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from spatialdl.data.format import ShardInfo
from spatialdl.data.staging.cache import NodeCache, StagedJob
from spatialdl.data.staging.copying import (
    BusyError,
    StoppedError,
    WriteError,
    fetch,
    is_whole,
    writing,
)
from spatialdl.data.staging.local_disk import DiskSpace
from spatialdl.data.staging.read_priority import ReadPriority
from spatialdl.errors import ShardError

AT_ONCE = 4  # files
NO_ROOM = "there is no room for it"
_LOOK_AGAIN_S = 0.2
_TELL_EVERY_S = 0.5

What = Literal["copied", "reused", "left", "unreadable", "damaged", "moved", "done"]


@dataclass(frozen=True)
class Order:
    """What is to be done.

    Attributes:
        source: the data set folder.
        disk: where the cache is, see `NodeCache`.
        job: folder of the job in it.
        shards: file, bytes and SHA-256 of each, in the order in which they are wanted.
        keep: whether copies stay when the job ends.
    """

    source: str
    disk: str
    job: str
    shards: Sequence[tuple[str, int, str]]
    keep: bool

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Order:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class ShardEvent:
    """What became of a shard; `why` it is left where it was, or what is wrong with it.

    "moved" are bytes of shards that are on their way.
    """

    what: What
    file: str = ""
    bytes: int = 0
    why: str = ""


class Copier:
    """Copies the shards of an order, several at once.

    Args:
        tell: hears what happens.
        stopped: set when the job has ended.
    """

    def __init__(
        self, order: Order, tell: Callable[[ShardEvent], object], stopped: threading.Event
    ) -> None:
        self._source, self._cache = Path(order.source), NodeCache(Path(order.disk))
        self._job = StagedJob(self._cache, Path(order.job))
        self._room = DiskSpace(self._job.path)
        self._todo = deque(ShardInfo(*shard, samples=0) for shard in order.shards)
        self._tell, self._stopped = tell, stopped
        self._broken = ""
        self._moved, self._told_at = 0, time.monotonic()
        self._of_others: dict[str, int] = {}
        self._counting = threading.Lock()
        self._giving_way = ReadPriority(self._job.path, stopped)

    def run(self) -> None:
        """Return when all is copied that can be, or when told to stop."""
        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                for thread in [threads.submit(self._work) for _ in range(AT_ONCE)]:
                    thread.result()
        finally:
            self._giving_way.close()
        if not self._stopped.is_set():
            self._tell_moved()
            self._tell(ShardEvent("done"))

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                info = self._todo.popleft()
            except IndexError:
                return
            try:
                self._tell(self._stage(info))
            except BusyError:  # another job's copier is at it: see later what became of that
                self._look_at_others(info)
                self._todo.append(info)
                self._stopped.wait(_LOOK_AGAIN_S)
            except StoppedError:
                return

    def _stage(self, info: ShardInfo) -> ShardEvent:
        what, why = self._become(info)
        return ShardEvent(what, info.file, info.bytes, why)

    def _become(self, info: ShardInfo) -> tuple[What, str]:
        """Stage a shard; what became of it, and why."""
        try:
            with writing():
                if self._has_old(info) or self._cache.take_over(info, self._job.path):
                    return "reused", ""
            if self._broken:
                return "left", self._broken
            return self._copy(info)
        except WriteError as error:
            if not error.is_full:
                self._broken = f"{self._job.path} cannot be written to: {error.strerror}"
            return "left", self._broken or NO_ROOM
        except ShardError as error:
            return "damaged", str(error)
        except OSError as error:
            return "unreadable", str(error)

    def _copy(self, info: ShardInfo) -> tuple[What, str]:
        """Copy a shard if there is room for it, and no other job has just done so."""
        partial = self._cache.partial(info)
        with writing():
            there = partial.stat().st_size if partial.exists() else 0
            done, left = 0, max(0, info.bytes - there)
            if not self._room.promise(left):
                return "left", NO_ROOM

        def progress(count: int) -> None:
            nonlocal done, left
            self._count(count)
            done += count
            now = info.bytes - max(done, there)
            self._room.release(left - now)
            left = now

        try:
            copied = fetch(
                self._source / info.file,
                partial,
                info,
                lambda: self._cache.publish(info, self._job.path),
                stopped=self._stopped.is_set,
                progress=progress,
                turn=self._giving_way.turn,
                arrived=lambda: self._cache.take_over(info, self._job.path),
            )
        finally:
            self._room.release(left)
        return ("copied", "") if copied else ("reused", "")

    def _count(self, count: int) -> None:
        """Tell of bytes now and then, so that a copier that gets no further is noticed."""
        with self._counting:
            self._moved += max(count, 0)
            if time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self._tell_moved()

    def _tell_moved(self) -> None:
        self._tell(ShardEvent("moved", bytes=self._moved))
        self._moved, self._told_at = 0, time.monotonic()

    def _look_at_others(self, info: ShardInfo) -> None:
        """Count what another copier does for this job, too."""
        with suppress(FileNotFoundError):
            size = self._cache.partial(info).stat().st_size
            before = self._of_others.setdefault(info.file, size)
            self._of_others[info.file] = size
            self._count(size - before)

    def _has_old(self, info: ShardInfo) -> bool:
        """Whether an earlier job has left the shard, and as it was."""
        try:
            if is_whole(self._job.unchecked(info), info, self._stopped.is_set, self._count):
                self._job.accept(info)
                return True
        except FileNotFoundError:
            return False
        except OSError:
            pass
        self._job.reject(info)
        return False


def main() -> None:
    """Copy what the order on the standard input says; clean up when the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = Order.from_line(sys.stdin.readline())
    stopped, writing = threading.Event(), threading.Lock()

    def tell(event: ShardEvent) -> None:
        with writing, suppress(BrokenPipeError):
            print(json.dumps(asdict(event)), flush=True)

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stopped.set()

    waiting = threading.Thread(target=wait_for_the_end, daemon=True)
    waiting.start()
    try:
        Copier(order, tell, stopped).run()
        waiting.join()
    finally:
        NodeCache(Path(order.disk)).leave(Path(order.job), keep=order.keep)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
