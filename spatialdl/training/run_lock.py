"""One run at a time writes to a run directory.

Rank 0 keeps a file locked, in which stands who it is. A job that Slurm has started again takes the
directory from its own start before: that one is over for Slurm, but its lock may be there still. A
file server keeps the locks of a node that died for a while, and on a node that is only cut off the
processes live on. So a new file takes the place of the old one, and a rank 0 that finds another
start of its job in it ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self
from uuid import uuid4

from spatialdl.comm.ending import end_job_for_sure
from spatialdl.data.saving import NO_LOCKS

log = logging.getLogger("spatialdl.trainer")

NAME = ".lock"

_NOTICED_S = 90.0  # clients of NFS see what others write after 60, and lose their locks after 90
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class LockHolder:
    """Who has a run directory.

    Attributes:
        host: where its rank 0 runs.
        process: of rank 0 there.
        job: of Slurm, with its cluster; empty elsewhere.
        start: how often Slurm has started that job before.
    """

    host: str
    process: int
    job: str = ""
    start: int = 0

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Self:
        """This process.

        Args:
            environment: of Slurm; ``os.environ`` by default.
        """
        environment = os.environ if environment is None else environment
        words = [environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")]
        start = environment.get("SLURM_RESTART_COUNT", "0")
        job = "/".join(words) if words[1] else ""
        return cls(socket.gethostname(), os.getpid(), job, int(start) if start.isdigit() else 0)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What a file says; None if it is no holder."""
        try:
            found = json.loads(path.read_text())
            host, process, job, start = (found[name] for name in cls.__dataclass_fields__)
            return cls(str(host), int(process), str(job), int(start))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def has_taken_over(self, other: LockHolder | None) -> bool:
        """Whether this is a later start of the other's job."""
        if other is None or not self.job:
            return False
        return self.job == other.job and self.start > other.start

    def __str__(self) -> str:
        job = f"job {self.job.rpartition('/')[2]}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """See to it that no other run writes to a directory meanwhile; it is made if it is not there.

    Raises:
        ValueError: if one does.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, own = run_dir / NAME, LockHolder.here()
    over = threading.Event()
    with _acquired(path, own):
        watch = threading.Thread(
            target=_watch, args=(path, own, over), name="run directory", daemon=True
        )
        if own.job:  # nobody takes it from others
            watch.start()
        try:
            yield
        finally:
            over.set()


def _acquired(path: Path, own: LockHolder) -> IO[bytes]:
    """The file, locked, with our name in it."""
    while True:
        file: IO[bytes] = path.open("ab")
        locked = _lock(file)
        if locked and not _is_at(file, path):
            file.close()  # another file has taken its place before it was ours
            continue
        there = LockHolder.read(path)
        if own.has_taken_over(there):
            file = _taken_over(path, own, file, str(there))
        elif locked:
            _write(file, own)
        else:
            file.close()
            by = f" ({there})" if there else ""
            raise ValueError(
                f"another run is writing to {path.parent}{by}: wait for it, or take another "
                "hydra.run.dir"
            )
        return file


def _taken_over(path: Path, own: LockHolder, old: IO[bytes], holder: str) -> IO[bytes]:
    """Put a file of ours in place of an earlier start's, and let whoever holds that one end."""
    new = path.with_name(f"{NAME}.{uuid4().hex}.tmp")
    file = new.open("xb")
    _lock(file)
    _write(file, own)
    new.replace(path)
    with old:
        if _lock(old):
            return file
        log.info(
            "%s is locked by an earlier start of this job (%s): waiting for its end, up to %d s",
            *(path, holder, _NOTICED_S),
        )
        end = time.monotonic() + _NOTICED_S
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
            if _lock(old):
                return file
    log.warning("%s does not answer, and is over for Slurm: going on without it", holder)
    return file


def _watch(path: Path, own: LockHolder, over: threading.Event) -> None:
    """End this job if a later start of it has the directory."""
    while not over.wait(_LOOK_EVERY_S):
        there = LockHolder.read(path)
        if there is not None and there.has_taken_over(own) and not over.is_set():
            sys.stderr.write(f"this job was started again ({there}): its start before ends\n")
            end_job_for_sure()  # ranks may be out of reach


def _lock(file: IO[bytes]) -> bool:
    """Whether this process has the lock now; said to be so where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.info("the file system of %s has no locks: no other run may write to it", file.name)
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _write(file: IO[bytes], own: LockHolder) -> None:
    file.truncate(0)
    file.write(json.dumps(asdict(own)).encode())
    file.flush()
