"""The user's folder on a disk of the node: shards under their checksums, and who uses them.

::

    DISK/.spatialdl-UID/
        lock                  held for moments, while names are given or removed
        shards/SHA256.h5      whole and verified
        shards/SHA256.part    on its way; its writer has it locked
        jobs/NAME/lock        held as long as the job or its copier lives
        jobs/NAME/reading     held while somebody reads from the source
        jobs/NAME/SHA256.h5   hard links: what has arrived for that job
        kept/SHA256.h5        hard links: what is to stay when no job is left

A shard with one name only belongs to nobody and is removed; so no job takes away what another one
uses, and what a killed job leaves is known by its lock, which ended with it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from spatialdl.data.format import ShardInfo
from spatialdl.data.inside import check_own
from spatialdl.data.saving import fsync_folder
from spatialdl.data.staging.copying import is_still
from spatialdl.errors import ShardError

_LOCK = "lock"
_FOLDERS = ("shards", "jobs", "kept")
_UNCHECKED = ".unchecked"


def local_name(info: ShardInfo) -> str:
    """The name of a shard's copy.

    Raises:
        ShardError: the manifest has no SHA-256 of it.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", info.sha256):
        raise ShardError(
            f"the manifest is damaged: {info.sha256!r} is no SHA-256 of {info.file}; "
            "copy or write the data set again"
        )
    return f"{info.sha256}.h5"


class NodeCache:
    """The folder; it is there while somebody uses it.

    Args:
        disk: where it lies.
    """

    def __init__(self, disk: Path) -> None:
        self.path = disk / f".spatialdl-{os.getuid()}"

    def partial(self, info: ShardInfo) -> Path:
        """Where a shard lies until it is whole."""
        return self.path / "shards" / f"{info.sha256}.part"

    def join(self, wanted: Collection[ShardInfo]) -> StagedJob:
        """Begin a job, after a look for what dead ones have left.

        Args:
            wanted: shards that it may reuse, or resume.

        Raises:
            OSError: the disk cannot be written to, or knows no locks or links.
            ShardError: somebody else has a folder of that name.
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
        """Remove what no living job uses, also what was to be kept; returns the bytes.

        Raises:
            OSError: it cannot be removed.
            ShardError: somebody else has a folder of that name.
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
        """End a job; a second time does nothing.

        Args:
            job: its folder.
            keep: whether its shards, and parts of shards, stay for later ones.
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
        """Give a part, which is whole now, its name; the job has it from the first moment."""
        part = self.partial(info)
        part.chmod(0o400)
        with suppress(FileExistsError):
            os.link(part, job / local_name(info))
        part.rename(self._shard(info))
        fsync_folder(part.parent)

    def take_over(self, info: ShardInfo, job: Path) -> bool:
        """Let a job use the shard of another one, which has just copied it."""
        with suppress(FileExistsError):
            try:
                os.link(self._shard(info), job / local_name(info))
            except FileNotFoundError:
                return False
        return True

    def reject(self, info: ShardInfo) -> None:
        """Take a copy that is damaged away from everybody."""
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
            with suppress(FileNotFoundError):  # a part has just got its name
                size += path.stat().st_size
        return size

    def _sweep(self, wanted: Collection[str]) -> None:
        """Remove dead jobs, shards of nobody, and parts that nobody writes."""
        for job in self._jobs():
            if not _is_held(job / _LOCK):
                shutil.rmtree(job, ignore_errors=True)
        for path in (self.path / "shards").iterdir():
            if path.suffix == ".h5":
                unused = path.stat().st_nlink == 1
            else:
                unused = path.stem not in wanted and not _is_held(path)
            if unused:
                path.unlink(missing_ok=True)

    def _remove_if_unused(self) -> None:
        """The folder itself; `_locked` of another process sees that it is gone."""
        if any(any((self.path / name).iterdir()) for name in _FOLDERS):
            return
        for name in _FOLDERS:
            (self.path / name).rmdir()
        (self.path / _LOCK).unlink()
        with suppress(OSError):  # something that is not ours lies in it
            self.path.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            try:
                if check_own(self.path) & 0o077:
                    self.path.chmod(0o700)
                lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last of its users has just removed it
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_still(self.path / _LOCK, lock):
                    continue
                for name in _FOLDERS:
                    (self.path / name).mkdir(exist_ok=True)
                yield
                return
            finally:
                os.close(lock)


class StagedJob:
    """One job's part of the folder: which shards have arrived for it.

    Attributes:
        path: the folder in which its copies lie, see `local_name`.
        lock: descriptor, -1 if not held; as long as it is open somewhere, the job lives.
    """

    def __init__(self, cache: NodeCache, path: Path) -> None:
        self.cache, self.path, self.lock = cache, path, -1

    def hold(self) -> None:
        """Take the lock, for as long as this process lives or until `close`."""
        self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def unchecked(self, info: ShardInfo) -> Path:
        """A shard of an earlier job, which is hashed before it is used."""
        return (self.path / local_name(info)).with_suffix(_UNCHECKED)

    def accept(self, info: ShardInfo) -> None:
        """Use a shard of an earlier job."""
        self.unchecked(info).rename(self.path / local_name(info))

    def reject(self, info: ShardInfo) -> None:
        """Remove a shard of an earlier job, which is damaged."""
        self.unchecked(info).unlink()
        self.cache.reject(info)

    def close(self) -> None:
        """Let go of the lock."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def _is_held(path: Path) -> bool:
    """Whether a living process has a file locked."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
