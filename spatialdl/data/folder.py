"""A data set folder that appears whole or not at all.

Everything is written into a hidden sibling of the folder (same file system, so that the last
step is a rename). An interrupted run leaves at most that sibling, which is no data set and
carries the name of what it was to become; the next run removes it or goes on with it. The folder
itself, old or new, is always whole. Ranks that write one data set agree on how it went, so
that none waits for one that failed.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from spatialdl.data.format import MANIFEST
from spatialdl.data.inside import check_own
from spatialdl.data.saving import NO_LOCKS, fsync_folder, load_json, show
from spatialdl.errors import ShardError

SETTINGS = "settings.json"
COORDS = "coords"
_RESULTS = (MANIFEST, COORDS)  # what is not replaced unasked
_OURS = re.compile(
    r"manifest\.json|shard-\d{5}\.h5|settings\.json|coords|records|pictures|process_list\.csv"
    r"|report\.html|statistics\.json|lock"
)
_LOCK = "lock"


class FolderInProgress:
    """The hidden sibling in which a folder is built; `publish` renames it, `discard` removes it.

    Args:
        target: the folder to be made.
        overwrite: replace a data set that is there; it stays until the new one is whole.

    Raises:
        ShardError: `target` exists and may not be replaced, or its parent cannot be written to.
    """

    _lock: FileIO

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.target = Path(target).resolve()
        check_target(self.target, overwrite=overwrite)
        self.overwrite = overwrite
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.path = self._make()
        except OSError as error:
            raise ShardError(f"cannot write beside {self.target}: {error.strerror}") from error

    def _make(self) -> Path:
        parent, name = self.target.parent, self.target.name
        _remove_abandoned(self.target)
        path = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
        self._lock = (path / _LOCK).open("ab+", 0)
        with suppress(OSError):  # without locks nobody can tell whether it was abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock.write(socket.gethostname().encode())
        return path

    def publish(self) -> None:
        """Give the folder its name; an old data set of that name is removed afterwards."""
        check_target(self.target, overwrite=self.overwrite)
        self._unlock()
        show(self.path)
        fsync_folder(self.path)
        try:
            if self.target.exists():
                self.target.rename(self._old)
            self.path.rename(self.target)
        except BaseException:
            if self._old.exists() and not self.target.exists():
                self._old.rename(self.target)
            raise
        fsync_folder(self.target.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was built."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _unlock(self) -> None:
        """Nobody is to find a lock in the folder."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    @property
    def _old(self) -> Path:
        """Where the old data set is while the new one gets its name."""
        return self.path.with_name(self.path.name.replace(".partial", ".old"))


class ResumableFolder(FolderInProgress):
    """The same, under a name by which the next run finds what an interrupted one has done.

    One process has it at a time: it holds a lock that ends with the process.

    Args:
        target: the folder to be made.
        overwrite: replace a data set that is there, whatever it is.
        settings: that of a data set which may be replaced, too, by one that holds all of it.

    Attributes:
        before: the folder of that data set, None if there is none or `overwrite` is given.

    Raises:
        ShardError: as `FolderInProgress`, or another process is at it; says which.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        settings: object = None,
    ) -> None:
        # what may be replaced is known when no other process can change it any more
        super().__init__(target, overwrite=True)
        try:
            self._end_publishing()
            same = settings is not None and load_json(self.target / SETTINGS) == settings
            self.before = self.target if same and not overwrite else None
            self.overwrite = overwrite or same
            check_target(self.target, overwrite=self.overwrite)
        except BaseException:
            self.leave()
            raise

    def _end_publishing(self) -> None:
        """Do what was left to do by a run that was killed while it gave the folder its name."""
        if self._old.exists():
            check_own(self._old)
            if self.target.exists() and not any(self.target.iterdir()):
                self.target.rmdir()
            if self.target.exists():
                shutil.rmtree(self._old, ignore_errors=True)
            else:
                self._old.rename(self.target)
        (self.target / _LOCK).unlink(missing_ok=True)

    def _make(self) -> Path:
        path = self.target.with_name(f".{self.target.name}.partial")
        while True:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            try:
                check_own(path)
                self._lock = (path / _LOCK).open("ab+", 0)
            except FileNotFoundError:  # another one has just renamed it
                continue
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._lock:
                    self._lock.seek(0)
                    who = self._lock.read().decode() or "another process"
                raise ShardError(
                    f"{self.target} is being written by {who}; wait for it, or name another folder"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warnings.warn(
                    f"the file system of {path} has no locks: see to it that no other batch "
                    f"writes to {self.target} meanwhile",
                    stacklevel=2,
                )
            if self._still_there(path):
                break
            self._lock.close()  # the other one has just renamed it
        host, now = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk is not met here: this is for others to read
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {host} since {now}".encode())
        return path

    def _still_there(self, path: Path) -> bool:
        try:
            return os.path.samestat((path / _LOCK).stat(), os.fstat(self._lock.fileno()))
        except FileNotFoundError:
            return False

    def _unlock(self) -> None:
        """Later: another run may look at the folder meanwhile."""

    def publish(self) -> None:
        """Give the folder its name; an old one of that name is removed afterwards."""
        super().publish()
        (self.target / _LOCK).unlink()
        self._lock.close()

    def leave(self) -> None:
        """Keep what is there, if anything, for another run; nothing if it is published."""
        if not self._lock.closed and self.path.is_dir() and os.listdir(self.path) == [_LOCK]:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(target: Path) -> None:
    """Remove what processes of this machine that were killed have left of a folder."""
    host = socket.gethostname().encode()
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError, ShardError):
            check_own(path)
            with (path / _LOCK).open("rb+", 0) as lock:
                if lock.read() == host:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or somebody is at it
                    shutil.rmtree(path, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be replaced: not ours, or ours without `overwrite`.

    Raises:
        ShardError: says what is there and what to do.
    """
    try:
        if not target.exists():
            return
        inside = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    except OSError as error:
        raise ShardError(f"cannot look into output {target}: {error.strerror}") from error
    if not target.is_dir():
        raise ShardError(f"output {target} is a file; name a folder")
    if target.is_mount():
        raise ShardError(
            f"output {target} is a mount point, which gets no other name; name a folder in it"
        )
    if not inside:
        return
    if MANIFEST not in inside and SETTINGS not in inside:
        raise ShardError(
            f"output folder {target} holds {_some(inside)} and is no data set; "
            "name a new or empty folder"
        )
    if not overwrite and holds_results(target):
        raise ShardError(
            f"output folder {target} holds a data set already; "
            "name another folder or allow it to be overwritten (--overwrite)"
        )
    foreign = [name for name in inside if not _OURS.fullmatch(name)]
    if foreign:
        raise ShardError(
            f"output folder {target} also holds {_some(foreign)}, which overwriting would "
            "delete; move it away or name another folder"
        )


def holds_results(folder: Path) -> bool:
    """Whether there is something in a folder that took long to make."""
    return any((folder / name).exists() for name in _RESULTS)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class Comm(Protocol):
    """What of a communicator of mpi4py is used."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """Processes."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """What each has given."""


def agree(comm: Comm, error: BaseException | None) -> None:
    """All ranks call it, each with what went wrong there, if anything did.

    Raises:
        ShardError: something went wrong elsewhere; says what and where.
        BaseException: `error` itself, where there is one.
    """
    said = None if error is None else f"{type(error).__name__}: {error}"
    problems = comm.allgather(said)
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ShardError(f"rank {rank} failed, so no data set was written: {problem}")
