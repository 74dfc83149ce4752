"""Who reads from the source to train comes before who copies from it.

Every process that reads a box from the source, of a job that is staged, holds a shared lock
meanwhile; the copier of the node looks for it between two pieces. A lock ends with its process,
however that ended.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = "reading"
_QUIET_S = 0.02  # that nobody reads is no pause between two boxes
_LOOK_EVERY_S = 0.005
_PATIENCE_S = 30.0
_UNCONTESTED_S = 1.0


@contextmanager
def reading_source(job: Path) -> Iterator[None]:
    """While a box is read from the source.

    Args:
        job: folder of the job on the disk of the node, see `cache.Job`.
    """
    file = -1
    try:
        with suppress(OSError):  # no copier looks at it, or the disk knows no locks
            # opened each time: threads, and processes that were forked, would share one lock
            file = os.open(job / _NAME, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        if file >= 0:
            os.close(file)


class ReadPriority:
    """When the threads of a copier may read from the source.

    They wait for a moment in which nobody else of this node does, and read one after the other,
    until there is more than such moments. Where there is none for half a minute the training is
    slower than the source lets it be, copies or not: they wait no longer, because the sooner all is
    copied the sooner it is quick.

    Args:
        job: folder of the job.
        stopped: nobody waits when it is set.
        patience: seconds without such a moment.
    """

    def __init__(self, job: Path, stopped: threading.Event, patience: float = _PATIENCE_S) -> None:
        self._stopped, self._patience = stopped, patience
        self._turns = threading.Lock()
        self._file = -1
        with suppress(OSError):  # the copier finds out what is wrong with the disk
            self._file = os.open(job / _NAME, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._quiet = time.monotonic()  # when it was so last
        self._busy = self._quiet

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While a piece is read."""
        with self._turns:
            self._wait()
            if time.monotonic() - self._busy < _UNCONTESTED_S:
                yield
                return
        yield

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wait(self) -> None:
        while not self._stopped.is_set():
            now = time.monotonic()
            if self._is_read():
                self._busy = now
            elif now - self._busy >= _QUIET_S:
                self._quiet = now
                return
            if now - self._quiet > self._patience:
                return
            self._stopped.wait(_LOOK_EVERY_S)

    def _is_read(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False
