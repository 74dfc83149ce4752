"""Folders for the files of one job, removed with it or by a later one.

A process that is killed removes nothing. It holds a lock on its folders, so that the next one
recognises those that nobody uses.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "spatialdl-mpi-"
_YOUNG_S = 10.0  # a folder may not be locked yet


@contextmanager
def job_folder(base: Path) -> Iterator[str]:
    """A new folder in `base`, without those that killed jobs of this user have left there.

    Args:
        base: folder for temporary files.
    """
    _remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks there: it cannot be mistaken for an abandoned one
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, or removed meanwhile
            status = folder.stat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
