"""The copier of a node as the rank that started it sees it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import spatialdl
from spatialdl.data.format import ShardInfo
from spatialdl.data.staging.cache import NodeCache
from spatialdl.data.staging.copier import Order, ShardEvent
from spatialdl.text import readable_bytes

log = logging.getLogger("spatialdl.data")

_PATIENCE_S = 10.0  # for the copier to end; a file system that hangs does not hold up the job

_SLOW = 1_000_000  # bytes a second, fewer than a disk or file server gives that is up to its work
_SLOW_AFTER_S = 60.0  # the copier itself waits up to half of it for ranks that read


class CopierProcess:
    """A copier at work, and what it has told so far.

    Args:
        source: the data set folder.
        disk: folder on a disk of the node.
        wanted: shards that may be used, of which some may be there from an earlier job.
        keep: whether copies stay when it is closed.

    Attributes:
        there: files that an earlier job has left, to be checked.
        shards: of what the copier told, how many there were; `bytes` likewise.
        damaged: files whose bytes in the source are not what was written, and what is wrong.

    Raises:
        OSError: the disk cannot be written to.
        ShardError: somebody else has our folder there.
    """

    def __init__(self, source: Path, disk: Path, wanted: Sequence[ShardInfo], keep: bool) -> None:
        self._source, self._disk, self._keep = source, disk, keep
        self._cache = NodeCache(disk)
        self._job = self._cache.join(wanted)
        self.there = {info.file for info in wanted if self._job.unchecked(info).exists()}
        self.shards: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.damaged: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._told: list[str] = []
        self._listening: threading.Thread | None = None
        self._said: set[str] = set()
        self._since = time.monotonic(), 0
        self._last_words = ""

    @property
    def folder(self) -> Path:
        """Where copies are when they have arrived."""
        return self._job.path

    def start(self, shards: Sequence[ShardInfo]) -> None:
        """Begin to copy these, in this order.

        Raises:
            OSError: no process can be started.
        """
        path = os.pathsep.join(
            [str(Path(spatialdl.__file__).parents[1]), *filter(None, [os.getenv("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "spatialdl.data.staging.copier"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[self._job.lock],  # the job lives as long as one of us does
            start_new_session=True,  # a signal to our group is not for it: it has to clean up
        )
        self._listening = threading.Thread(target=self._listen, name="copier", daemon=True)
        self._listening.start()
        order = Order(
            str(self._source),
            str(self._disk),
            str(self._job.path),
            [(info.file, info.bytes, info.sha256) for info in shards],
            self._keep,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `look` says so
            self._process.stdin.write(order.to_line())
            self._process.stdin.flush()

    def look(self) -> None:
        """Take note of what the copier has told; log what is wrong, each kind once."""
        if self._process is None:
            return
        ended = self._process.poll()
        if ended is not None and self._listening is not None:
            self._listening.join(_PATIENCE_S)
        while self._told:
            line = self._told.pop(0)
            try:
                self._note(ShardEvent(**json.loads(line)))
            except (ValueError, TypeError):
                self._last_words = line.strip()
        if ended is not None:
            how = f"was killed ({signal.Signals(-ended).name})" if ended < 0 else f"ended ({ended})"
            self._say("ended", f"the copier {how}", self._last_words)
        elif not self.shards["done"]:
            self._look_at_speed()

    def close(self) -> None:
        """End the copier, and with it the job; a second time does nothing."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                log.warning("%s: the copier did not end and was killed", socket.gethostname())
        if self._job.lock < 0:
            return
        try:
            self._cache.leave(self._job.path, keep=self._keep)
        except OSError as error:
            log.warning("%s: cannot clean up %s: %s", socket.gethostname(), self._job.path, error)
        self._job.close()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.append(line)

    def _look_at_speed(self) -> None:
        (before, there), now = self._since, time.monotonic()
        if now - before < _SLOW_AFTER_S:
            return
        self._since = now, self.bytes["moved"]
        moved = self.bytes["moved"] - there
        if moved < _SLOW * (now - before):
            why = f"{readable_bytes(moved)} in the last {now - before:.0f} s"
            self._say("slow", "copying is slow, or stands still", why)

    def _note(self, event: ShardEvent) -> None:
        self.bytes[event.what] += event.bytes
        if event.what == "moved":
            return
        self.shards[event.what] += 1
        if event.what == "damaged":
            self.damaged[event.file] = event.why
        elif event.what in ("left", "unreadable"):
            self._say(event.what + event.why * (event.what == "left"), event.file, event.why)

    def _say(self, kind: str, what: str, why: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        log.warning(
            "%s: %s; what is not in %s is read from %s",
            *(socket.gethostname(), f"{what}: {why}" if why else what, self._disk, self._source),
        )
