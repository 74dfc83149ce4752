"""The user's cache on a disk of the node: shards by checksum, shared by jobs.

::

    DISK/.spatialdl-UID/
        lock                  held briefly, while names are added or removed
        shards/SHA256.h5      complete and verified
        shards/SHA256.part    in progress, locked by its writer
        jobs/NAME/lock        held as long as the job or its copier lives
        jobs/NAME/reading     held during reads from the source
        jobs/NAME/SHA256.h5   hard links: shards available to that job
        kept/SHA256.h5        hard links: shards to keep when no job is left

A shard with a single link is unused and is removed, so no job removes shards that another one uses.
The remains of a killed job are recognised by its lock, which was released with the process.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from spatialdl.common.files import FileLock, check_own, fsync_folder, is_locked
from spatialdl.data.samples import ShardInfo
from spatialdl.errors import ShardError

_LOCK = "lock"
_FOLDERS = ("shards", "jobs", "kept")
_UNCHECKED = ".unchecked"


def local_name(info: ShardInfo) -> str:
    """The file name of a shard's copy.

    Raises:
        ShardError: the manifest has no valid SHA-256 for it.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", info.sha256):
        raise ShardError(
            f"the manifest is damaged: {info.sha256!r} is not a SHA-256 of {info.file}; "
            "copy or write the data set again"
        )
    return f"{info.sha256}.h5"


class NodeCache:
    """The cache folder, which exists while it is used.

    Args:
        disk: its parent folder.
    """

    def __init__(self, disk: Path) -> None:
        self.path = disk / f".spatialdl-{os.getuid()}"

    def partial(self, info: ShardInfo) -> Path:
        """Path of a shard in progress."""
        return self.path / "shards" / f"{info.sha256}.part"

    def join(self, wanted: Collection[ShardInfo]) -> StagedJob:
        """Start a job, after removing the remains of dead ones.

        Args:
            wanted: shards that it may reuse, or resume.

        Raises:
            OSError: the disk is not writable, or does not support locks or links.
            ShardError: the folder belongs to another user.
        """
        with self._locked():
            folder = self.path / "jobs" / f"{os.getpid()}-{uuid4().hex[:8]}"
            folder.mkdir()
            job = StagedJob(self, folder)
            try:
                job.hold()
                for info in wanted:
                    with suppress(FileNotFoundError, FileExistsError):
                        os.link(self._shard(info), job.unchecked(info))
                os.link(folder / _LOCK, folder / ".probe")
                self._sweep({info.sha256 for info in wanted})
            except BaseException:
                job.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return job

    def clean(self) -> int:
        """Remove shards that no living job uses, kept ones included; return the freed bytes.

        Raises:
            OSError: they cannot be removed.
            ShardError: the folder belongs to another user.
        """
        if not self.path.is_dir():
            return 0
        with self._locked():
            before = self._bytes()
            for link in (self.path / "kept").iterdir():
                link.unlink()
            self._sweep(())
            freed = before - self._bytes()
            self._remove_if_unused()
            return freed

    def leave(self, job: Path, *, keep: bool) -> None:
        """End a job; idempotent.

        Args:
            job: its folder.
            keep: whether its shards, and partial ones, are kept for later jobs.
        """
        with self._locked():
            if keep and job.is_dir():
                for shard in job.glob("*.h5"):
                    with suppress(FileExistsError):
                        os.link(shard, self.path / "kept" / shard.name)
            shutil.rmtree(job, ignore_errors=True)
            parts = (self.path / "shards").glob("*.part") if keep else ()
            self._sweep({part.stem for part in parts})
            self._remove_if_unused()

    def publish(self, info: ShardInfo, job: Path) -> None:
        """Rename a verified part to its final name, after linking it to the job."""
        part = self.partial(info)
        part.chmod(0o400)
        with suppress(FileExistsError):
            os.link(part, job / local_name(info))
        part.rename(self._shard(info))
        fsync_folder(part.parent)

    def take_over(self, info: ShardInfo, job: Path) -> bool:
        """Link a shard of another job, which has just copied it, to a job."""
        with suppress(FileExistsError):
            try:
                os.link(self._shard(info), job / local_name(info))
            except FileNotFoundError:
                return False
        return True

    def reject(self, info: ShardInfo) -> None:
        """Remove a damaged copy from all jobs."""
        with self._locked():
            for folder in (self.path / "shards", self.path / "kept", *self._jobs()):
                (folder / local_name(info)).unlink(missing_ok=True)

    def _shard(self, info: ShardInfo) -> Path:
        return self.path / "shards" / local_name(info)

    def _jobs(self) -> list[Path]:
        return [path for path in (self.path / "jobs").iterdir() if path.is_dir()]

    def _bytes(self) -> int:
        size = 0
        for path in (self.path / "shards").iterdir():
            with suppress(FileNotFoundError):  # a part was just renamed
                size += path.stat().st_size
        return size

    def _sweep(self, wanted: Collection[str]) -> None:
        """Remove dead jobs, unused shards, and parts without a writer."""
        for job in self._jobs():
            if not is_locked(job / _LOCK):
                shutil.rmtree(job, ignore_errors=True)
        for path in (self.path / "shards").iterdir():
            if path.suffix == ".h5":
                unused = path.stat().st_nlink == 1
            else:
                unused = path.stem not in wanted and not is_locked(path)
            if unused:
                path.unlink(missing_ok=True)

    def _remove_if_unused(self) -> None:
        """Remove the cache folder if it is empty; `_locked` of other processes detects this."""
        if any(any((self.path / name).iterdir()) for name in _FOLDERS):
            return
        for name in _FOLDERS:
            (self.path / name).rmdir()
        (self.path / _LOCK).unlink()
        with suppress(OSError):  # it contains foreign files
            self.path.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = None
        while lock is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # its last user has just removed it
                if check_own(self.path) & 0o077:
                    self.path.chmod(0o700)
                lock = FileLock(self.path / _LOCK, wait=True)
        with lock:
            for name in _FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
            yield


class StagedJob:
    """A job's folder in the cache, with the shards available to it.

    Attributes:
        path: the folder of its copies, see `local_name`.
        lock: the job lives as long as any process holds it.
    """

    lock: FileLock | None = None

    def __init__(self, cache: NodeCache, path: Path) -> None:
        self.cache, self.path = cache, path

    def hold(self) -> None:
        """Take the lock, until this process exits or calls `close`."""
        self.lock = FileLock(self.path / _LOCK)

    def unchecked(self, info: ShardInfo) -> Path:
        """Path of an earlier job's shard, which must be verified before use."""
        return (self.path / local_name(info)).with_suffix(_UNCHECKED)

    def accept(self, info: ShardInfo) -> None:
        """Use a verified shard of an earlier job."""
        self.unchecked(info).rename(self.path / local_name(info))

    def reject(self, info: ShardInfo) -> None:
        """Remove a damaged shard of an earlier job."""
        self.unchecked(info).unlink()
        self.cache.reject(info)

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None
