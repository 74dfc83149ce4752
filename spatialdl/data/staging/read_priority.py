"""I/O priority: training reads from the source take priority over staging.

Every process of a staged job that reads a box from the source holds a shared lock during the read;
the copier of the node checks it between two pieces. The lock is released when its process exits,
for any reason.
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
_QUIET_S = 0.02  # a shorter pause may lie between two boxes of one reader
_LOOK_EVERY_S = 0.005
_PATIENCE_S = 30.0
_UNCONTESTED_S = 1.0


@contextmanager
def reading_source(job: Path) -> Iterator[None]:
    """Hold the lock while a box is read from the source.

    Args:
        job: folder of the job on the disk of the node, see `cache.Job`.
    """
    file = -1
    try:
        with suppress(OSError):  # no copier checks it, or the disk has no locks
            # Opened each time: threads and forked processes would share one lock.
            file = os.open(job / _NAME, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        if file >= 0:
            os.close(file)


class ReadPriority:
    """Decides when the threads of a copier may read from the source.

    They wait until no other process of this node reads, and read one at a time unless the source
    has been idle for a while. If it is not idle for half a minute, training is limited by the
    source in any case, and they stop waiting: training speeds up once all is copied.

    Args:
        job: folder of the job.
        stopped: no thread waits once it is set.
        patience: seconds to wait for an idle source.
    """

    def __init__(self, job: Path, stopped: threading.Event, patience: float = _PATIENCE_S) -> None:
        self._stopped, self._patience = stopped, patience
        self._turns = threading.Lock()
        self._file = -1
        with suppress(OSError):  # the copier reports errors of the disk
            self._file = os.open(job / _NAME, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._quiet = time.monotonic()  # when the source was last idle
        self._busy = self._quiet

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context for reading one piece."""
        with self._turns:
            self._wait()
            if time.monotonic() - self._busy < _UNCONTESTED_S:
                yield
                return
        yield

    def close(self) -> None:
        """Close the lock file."""
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
