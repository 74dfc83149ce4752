"""The process that copies shards to the disk of a node, one for all ranks there.

It reads the arguments of `Copier`, and whether copies stay when the job ends (`keep`), as a line of
JSON from standard input, and reports events as lines of JSON on standard output. It cleans up and
exits when its input is closed, however the job ended, so it ignores the signals that launchers and
terminals send to all processes.
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
from typing import Any, Literal

from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import NodeCache, StagedJob
from spatialdl.data.staging.copying import (
    BusyError,
    ReadPriority,
    StoppedError,
    WriteError,
    fetch,
    is_whole,
    writing,
)
from spatialdl.data.staging.local_disk import DiskSpace
from spatialdl.errors import ShardError

AT_ONCE = 4  # files
NO_ROOM = "no space left for it"
_LOOK_AGAIN_S = 0.2
_REPORT_EVERY_S = 0.5

What = Literal["copied", "reused", "left", "unreadable", "damaged", "moved", "done"]


@dataclass(frozen=True)
class ShardEvent:
    """Outcome of a shard; `why` is the reason if it is not staged, or its damage.

    "moved" counts bytes of shards in progress.
    """

    what: What
    file: str = ""
    bytes: int = 0
    why: str = ""


class Copier:
    """Copies shards, several at once.

    Args:
        source: the data set folder.
        disk: folder of the cache, see `NodeCache`.
        job: folder of the job in the cache.
        shards: file, bytes and SHA-256 of each, in the order in which they are read.
        report: called with each event.
        stopped: set when the job has ended.
    """

    def __init__(
        self,
        source: str,
        disk: str,
        job: str,
        shards: Sequence[tuple[str, int, str]],
        *,
        report: Callable[[ShardEvent], object],
        stopped: threading.Event,
    ) -> None:
        self._source, self._cache = Path(source), NodeCache(Path(disk))
        self._job = StagedJob(self._cache, Path(job))
        self._room = DiskSpace(self._job.path)
        self._todo = deque(ShardInfo(*shard, samples=0) for shard in shards)
        self._report, self._stopped = report, stopped
        self._broken = ""
        self._moved, self._reported_at = 0, time.monotonic()
        self._foreign_sizes: dict[str, int] = {}
        self._counting = threading.Lock()
        self._priority = ReadPriority(self._job.path, stopped)

    def run(self) -> None:
        """Return when all possible copies are complete, or `stopped` is set."""
        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                for thread in [threads.submit(self._work) for _ in range(AT_ONCE)]:
                    thread.result()
        finally:
            self._priority.close()
        if not self._stopped.is_set():
            self._report_moved()
            self._report(ShardEvent("done"))

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                info = self._todo.popleft()
            except IndexError:
                return
            try:
                what, why = self._outcome(info)
                self._report(ShardEvent(what, info.file, info.bytes, why))
            except BusyError:  # another job's copier writes it: check the result later
                self._count_foreign(info)
                self._todo.append(info)
                self._stopped.wait(_LOOK_AGAIN_S)
            except StoppedError:
                return

    def _outcome(self, info: ShardInfo) -> tuple[What, str]:
        """Stage a shard; return the outcome and its reason."""
        try:
            with writing():
                if self._has_old(info) or self._cache.take_over(info, self._job.path):
                    return "reused", ""
            if self._broken:
                return "left", self._broken
            return self._copy(info)
        except WriteError as error:
            if not error.is_full:
                self._broken = f"cannot write to {self._job.path}: {error.strerror}"
            return "left", self._broken or NO_ROOM
        except ShardError as error:
            return "damaged", str(error)
        except OSError as error:
            return "unreadable", str(error)

    def _copy(self, info: ShardInfo) -> tuple[What, str]:
        """Copy a shard if there is room and no other job has just copied it."""
        partial = self._cache.partial(info)
        with writing():
            there = partial.stat().st_size if partial.exists() else 0
            done, left = 0, max(0, info.bytes - there)
            if not self._room.reserve(left):
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
                turn=self._priority.turn,
                arrived=lambda: self._cache.take_over(info, self._job.path),
            )
        finally:
            self._room.release(left)
        return ("copied", "") if copied else ("reused", "")

    def _count(self, count: int) -> None:
        """Report copied bytes at intervals, so that a stalled copier is detected."""
        with self._counting:
            self._moved += max(count, 0)
            if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
                self._report_moved()

    def _report_moved(self) -> None:
        self._report(ShardEvent("moved", bytes=self._moved))
        self._moved, self._reported_at = 0, time.monotonic()

    def _count_foreign(self, info: ShardInfo) -> None:
        """Count progress of another job's copier as well."""
        with suppress(FileNotFoundError):
            size = self._cache.partial(info).stat().st_size
            before = self._foreign_sizes.setdefault(info.file, size)
            self._foreign_sizes[info.file] = size
            self._count(size - before)

    def _has_old(self, info: ShardInfo) -> bool:
        """Whether an earlier job has left an intact copy of the shard."""
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
    """Execute the order on standard input; clean up when the input is closed."""
    # launchers and schedulers send them to all processes of a job, and ranks may still read
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    keep = order.pop("keep")
    stopped, writing = threading.Event(), threading.Lock()

    def report(event: ShardEvent) -> None:
        with writing, suppress(BrokenPipeError):
            print(json.dumps(asdict(event)), flush=True)

    def wait_for_end_of_input() -> None:
        sys.stdin.read()
        stopped.set()

    waiting = threading.Thread(target=wait_for_end_of_input, daemon=True)
    waiting.start()
    try:
        Copier(**order, report=report, stopped=stopped).run()
        waiting.join()
    finally:
        NodeCache(Path(order["disk"])).leave(Path(order["job"]), keep=keep)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
