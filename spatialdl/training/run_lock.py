"""Lock of a run directory: one run at a time writes to it.

Rank 0 locks a file that names its process. A job that Slurm has restarted takes the directory from
its previous start, whose lock may still exist: a file server keeps the locks of a dead node for a
while, and processes survive on a node that lost its network. So a new file replaces the old one,
and a rank 0 that finds a later start of its job in it exits.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self
from uuid import uuid4

from spatialdl.comm.ending import end_job_for_sure
from spatialdl.common.files import NO_LOCKS, is_at

log = logging.getLogger("spatialdl.trainer")

NAME = ".lock"

_NOTICED_S = 90.0  # NFS clients see writes of other clients after 60 s and lose locks after 90 s
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class LockHolder:
    """Owner of a run directory.

    Attributes:
        host: host of rank 0.
        process: process id of rank 0.
        job: Slurm cluster and job id; empty outside Slurm.
        start: restart count of the job.
    """

    host: str
    process: int
    job: str = ""
    start: int = 0

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Describe this process.

        Args:
            environment: environment variables; ``os.environ`` by default.
        """
        environment = os.environ if environment is None else environment
        words = [environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")]
        start = environment.get("SLURM_RESTART_COUNT", "0")
        job = "/".join(words) if words[1] else ""
        return cls(socket.gethostname(), os.getpid(), job, int(start) if start.isdigit() else 0)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the owner from a lock file; None if the file is invalid or missing."""
        try:
            content = json.loads(path.read_text())
            host, process, job, start = (content[name] for name in cls.__dataclass_fields__)
            return cls(str(host), int(process), str(job), int(start))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def has_taken_over(self, other: LockHolder | None) -> bool:
        """Whether this is a later start of the same job."""
        if other is None or not self.job:
            return False
        return self.job == other.job and self.start > other.start

    def __str__(self) -> str:
        job = f"job {self.job.rpartition('/')[2]}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which is created if missing.

    Raises:
        ValueError: if another run holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, own = run_dir / NAME, LockHolder.here()
    over = threading.Event()
    with _acquired(path, own):
        watch = threading.Thread(
            target=_watch, args=(path, own, over), name="run directory", daemon=True
        )
        if own.job:  # without Slurm there are no restarts that take the directory
            watch.start()
        try:
            yield
        finally:
            over.set()


def _acquired(path: Path, own: LockHolder) -> IO[bytes]:
    """Lock the file and write this process into it."""
    while True:
        file: IO[bytes] = path.open("ab")
        locked = _lock(file)
        if locked and not is_at(path, file.fileno()):
            file.close()  # it was replaced before it was locked
            continue
        there = LockHolder.read(path)
        if own.has_taken_over(there):
            file = _take_over(path, own, file, str(there))
        elif locked:
            _write(file, own)
        else:
            file.close()
            by = f" ({there})" if there else ""
            raise ValueError(
                f"another run is writing to {path.parent}{by}: wait for it, or set another "
                "hydra.run.dir"
            )
        return file


def _take_over(path: Path, own: LockHolder, old: IO[bytes], holder: str) -> IO[bytes]:
    """Replace the file of an earlier start and wait for its process to exit."""
    new = path.with_name(f"{NAME}.{uuid4().hex}.tmp")
    file = new.open("xb")
    _lock(file)
    _write(file, own)
    new.replace(path)
    with old:
        if _lock(old):
            return file
        log.info(
            "%s is locked by an earlier start of this job (%s): waiting up to %d s for its exit",
            *(path, holder, _NOTICED_S),
        )
        end = time.monotonic() + _NOTICED_S
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
            if _lock(old):
                return file
    log.warning("%s did not exit, but has ended for Slurm: continuing without its lock", holder)
    return file


def _watch(path: Path, own: LockHolder, over: threading.Event) -> None:
    """End this job if a later start of it has taken the directory."""
    while not over.wait(_LOOK_EVERY_S):
        there = LockHolder.read(path)
        if there is not None and there.has_taken_over(own) and not over.is_set():
            sys.stderr.write(f"this job was restarted ({there}): the earlier start exits\n")
            end_job_for_sure()  # ranks may be unreachable


def _lock(file: IO[bytes]) -> bool:
    """Try to lock a file; True also on file systems without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.info("the file system of %s has no locks: start no other run there", file.name)
    return True


def _write(file: IO[bytes], own: LockHolder) -> None:
    file.truncate(0)
    file.write(json.dumps(asdict(own)).encode())
    file.flush()
