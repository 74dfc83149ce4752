"""Handle of a node's copier in the rank that started it."""

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
from spatialdl.common.text import readable_bytes
from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import NodeCache
from spatialdl.data.staging.copier import ShardEvent

log = logging.getLogger("spatialdl.data")

_PATIENCE_S = 10.0  # limits the wait for the copier's exit, e.g. on a hanging file system

_SLOW = 1_000_000  # bytes per second; a working disk or file server is faster
_SLOW_AFTER_S = 60.0  # the copier itself waits up to half of it for reading ranks


class CopierProcess:
    """A running copier and the events that it has reported.

    Args:
        source: the data set folder.
        disk: folder on a disk of the node.
        wanted: shards that may be used; an earlier job may have left some of them.
        keep: whether copies stay after `close`.

    Attributes:
        there: files that an earlier job has left, still to be verified.
        shards: number of shards by outcome; `bytes` likewise.
        damaged: files whose bytes in the source differ from the manifest, and the damage.

    Raises:
        OSError: the disk is not writable.
        ShardError: the folder there belongs to another user.
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
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None
        self._warned: set[str] = set()
        self._since = time.monotonic(), 0
        self._last_output = ""

    @property
    def folder(self) -> Path:
        """Folder of the verified copies."""
        return self._job.path

    def start(self, shards: Sequence[ShardInfo]) -> None:
        """Start copying these shards, in this order.

        Raises:
            OSError: no process can be started.
        """
        lock = self._job.lock
        assert lock is not None  # until `close`
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
            pass_fds=[lock.descriptor],  # keeps the job alive as long as either process
            start_new_session=True,  # protects it from signals to our group: it must clean up
        )
        self._reader = threading.Thread(target=self._read_lines, name="copier", daemon=True)
        self._reader.start()
        order = {
            "source": str(self._source),
            "disk": str(self._disk),
            "job": str(self._job.path),
            "shards": [(info.file, info.bytes, info.sha256) for info in shards],
            "keep": self._keep,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has exited, which `look` reports
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def look(self) -> None:
        """Process the copier's reports; log problems, each kind once."""
        if self._process is None:
            return
        ended = self._process.poll()
        if ended is not None and self._reader is not None:
            self._reader.join(_PATIENCE_S)
        while self._lines:
            line = self._lines.pop(0)
            try:
                self._note(ShardEvent(**json.loads(line)))
            except (ValueError, TypeError):
                self._last_output = line.strip()
        if ended is not None:
            how = (
                f"was killed ({signal.Signals(-ended).name})" if ended < 0 else f"exited ({ended})"
            )
            self._warn("ended", f"the copier {how}", self._last_output)
        elif not self.shards["done"]:
            self._check_speed()

    def close(self) -> None:
        """End the copier and the job; idempotent."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                log.warning("%s: the copier did not exit and was killed", socket.gethostname())
        if self._job.lock is None:
            return
        try:
            self._cache.leave(self._job.path, keep=self._keep)
        except OSError as error:
            log.warning("%s: cannot clean up %s: %s", socket.gethostname(), self._job.path, error)
        self._job.close()

    def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    def _check_speed(self) -> None:
        (before, there), now = self._since, time.monotonic()
        if now - before < _SLOW_AFTER_S:
            return
        self._since = now, self.bytes["moved"]
        moved = self.bytes["moved"] - there
        if moved < _SLOW * (now - before):
            why = f"{readable_bytes(moved)} in the last {now - before:.0f} s"
            self._warn("slow", "copying is slow or has stalled", why)

    def _note(self, event: ShardEvent) -> None:
        self.bytes[event.what] += event.bytes
        if event.what == "moved":
            return
        self.shards[event.what] += 1
        if event.what == "damaged":
            self.damaged[event.file] = event.why
        elif event.what in ("left", "unreadable"):
            self._warn(event.what + event.why * (event.what == "left"), event.file, event.why)

    def _warn(self, kind: str, what: str, why: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        log.warning(
            "%s: %s; shards missing in %s are read from %s",
            *(socket.gethostname(), f"{what}: {why}" if why else what, self._disk, self._source),
        )
