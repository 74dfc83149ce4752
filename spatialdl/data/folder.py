"""Data set folders that appear complete or not at all.

All files are written to a hidden sibling folder (on the same file system, so that the last step is
a rename). An interrupted run leaves at most that sibling, which is not a data set and is named
after the target; the next run removes or resumes it. The folder itself, old or new, is always
complete.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from spatialdl.common.files import FileLock, apply_umask, check_own, fsync_folder, load_json
from spatialdl.data.format import MANIFEST
from spatialdl.errors import ShardError

SETTINGS = "settings.json"
COORDS = "coords"
_RESULTS = (MANIFEST, COORDS)  # replaced only with `overwrite`
_OURS = re.compile(
    r"manifest\.json|shard-\d{5}\.h5|settings\.json|coords|records|pictures|process_list\.csv"
    r"|report\.html|statistics\.json|lock"
)
_LOCK = "lock"


class FolderInProgress:
    """The hidden sibling in which a folder is built; `publish` renames it, `discard` removes it.

    Args:
        target: the folder to create.
        overwrite: replace an existing data set, which stays until the new one is complete.

    Raises:
        ShardError: `target` exists and must not be replaced, or its parent is not writable.
    """

    _lock: FileLock | None = None

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
        with suppress(OSError):  # without locks, abandoned folders cannot be recognised
            self._lock = FileLock(path / _LOCK)
            self._lock.write(socket.gethostname())
        return path

    def publish(self) -> None:
        """Rename the folder to its target; a data set of that name is removed afterwards."""
        check_target(self.target, overwrite=self.overwrite)
        self._unlock()
        apply_umask(self.path)
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
        self._release()

    def _unlock(self) -> None:
        """Remove the lock file before the folder is published."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _old(self) -> Path:
        """Where the old data set is while the new one is renamed."""
        return self.path.with_name(self.path.name.replace(".partial", ".old"))


class ResumableFolder(FolderInProgress):
    """A folder in progress with a fixed name, so that the next run resumes an interrupted one.

    One process owns it at a time: it holds a lock that is released when the process exits.

    Args:
        target: the folder to create.
        overwrite: replace an existing data set, regardless of its settings.
        settings: an existing data set with these settings may also be replaced, by one that
            contains all of it.

    Attributes:
        before: the folder of that data set, None if there is none or `overwrite` is set.

    Raises:
        ShardError: as `FolderInProgress`, or another process owns the folder.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        settings: object = None,
    ) -> None:
        # Whether the target may be replaced is decided under the lock, in the try block.
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
        """Complete the renames of a run that was killed while publishing."""
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
        while self._lock is None:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            try:
                check_own(path)
                self._lock = FileLock(path / _LOCK, optional=True)
            except FileNotFoundError:  # another process has just renamed it
                continue
            except BlockingIOError:
                owner = (path / _LOCK).read_text() or "another process"
                raise ShardError(
                    f"{self.target} is being written by {owner}; wait for it, or choose another "
                    "folder"
                ) from None
        host, now = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # the note only informs; later writes report a full disk
            self._lock.write(f"process {os.getpid()} on {host} since {now}")
        return path

    def _unlock(self) -> None:
        """Keep the lock until the folder is published: another run may look at it meanwhile."""

    def publish(self) -> None:
        """Rename the folder to its target; a data set of that name is removed afterwards."""
        super().publish()
        (self.target / _LOCK).unlink(missing_ok=True)
        self._release()

    def leave(self) -> None:
        """Keep partial results for another run; remove an empty folder."""
        if self._lock is not None and self.path.is_dir() and os.listdir(self.path) == [_LOCK]:
            shutil.rmtree(self.path, ignore_errors=True)
        self._release()


def _remove_abandoned(target: Path) -> None:
    """Remove partial folders of killed processes of this machine."""
    host = socket.gethostname()
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError, ShardError):
            check_own(path)
            if (path / _LOCK).read_text() == host:
                with FileLock(path / _LOCK, create=False):  # raises if in use
                    shutil.rmtree(path, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Reject a target that must not be replaced: not a data set, or one without `overwrite`.

    Raises:
        ShardError: with the contents of the target and what to do.
    """
    try:
        if not target.exists():
            return
        inside = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    except OSError as error:
        raise ShardError(f"cannot read output folder {target}: {error.strerror}") from error
    if not target.is_dir():
        raise ShardError(f"output {target} is a file; choose a folder")
    if target.is_mount():
        raise ShardError(
            f"output {target} is a mount point, which cannot be renamed; choose a folder in it"
        )
    if not inside:
        return
    if MANIFEST not in inside and SETTINGS not in inside:
        raise ShardError(
            f"output folder {target} contains {_some(inside)} and is not a data set; "
            "choose a new or empty folder"
        )
    if not overwrite and holds_results(target):
        raise ShardError(
            f"output folder {target} already contains a data set; "
            "choose another folder or allow overwriting (--overwrite)"
        )
    foreign = [name for name in inside if not _OURS.fullmatch(name)]
    if foreign:
        raise ShardError(
            f"output folder {target} also contains {_some(foreign)}, which overwriting would "
            "delete; move it away or choose another folder"
        )


def holds_results(folder: Path) -> bool:
    """Whether a folder contains results that are expensive to recompute."""
    return any((folder / name).exists() for name in _RESULTS)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
