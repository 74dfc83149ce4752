"""Atomic writes and locks of files, and checks of what another user may have created.

Names with `..` are rejected where names are read, but a link can also lead out of the folder, and
opening a pipe blocks forever. In a folder that is writable by all, such as /tmp, another user may
have created a folder under our name.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self
from uuid import uuid4

from spatialdl.errors import ShardError

TEMPORARY = ".*.tmp"
"""Glob pattern of temporary files; a killed process leaves them, and they are never read."""

_LONGEST_NAME = 240  # bytes; file systems allow 255, and files append suffixes

VOLUMES = {
    "nifti": (".nii", ".nii.gz"),
    "nrrd": (".nrrd", ".nhdr"),
    "tiff": (".tif", ".tiff", ".ome.tif", ".ome.tiff"),
    "zarr": (".zarr", ".ome.zarr"),
}
"""Suffixes of volumes by format; DICOM is recognised by content."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error codes of file systems without locks."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: it is renamed at the end of the block.

    As `unfinished`, for writers that take an open file.
    """
    with unfinished(path) as temporary, temporary.open("r+b") as file:
        yield file


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A temporary path of an empty file, which is renamed to `path` at the end of the block.

    An existing file is kept until then, and if the block raises. Several processes may write the
    same file: the last rename wins. Other users cannot read an unfinished file.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # independent of the length of the name
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield temporary
        apply_umask(temporary)
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def apply_umask(path: Path) -> None:
    """Give a private file or folder the permissions of a newly created one."""
    with suppress(OSError):  # some file systems have no modes
        before = path.stat().st_mode
        usual = 0o777 if stat.S_ISDIR(before) else 0o666
        path.chmod(before & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) | usual & ~_umask())


def _umask() -> int:
    """The umask: os.umask can read it only by changing it for all threads."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        [umask] = [line.split()[1] for line in status.splitlines() if line.startswith("Umask:")]
        return int(umask, 8)
    except (OSError, ValueError):  # not Linux, or an old kernel
        before = os.umask(0o077)
        os.umask(before)
        return before


def settle(temporary: Path, path: Path) -> None:
    """Sync a file to disk and rename it."""
    sync(temporary)
    temporary.replace(path)
    fsync_folder(path.parent)


def sync(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_table(
    path: Path, head: Iterable[str], rows: Iterable[Iterable[object]], errors: str = "strict"
) -> None:
    """Write a CSV file in UTF-8 atomically.

    Args:
        errors: how text that UTF-8 cannot encode is handled, see ``codecs``.
    """
    with replacing(path) as out:
        text = io.TextIOWrapper(out, encoding="utf-8", errors=errors, newline="")
        table = csv.writer(text)
        table.writerow(head)
        table.writerows(rows)
        text.flush()
        text.detach()


def link(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if the file system does not support hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with unfinished(target) as temporary:
            shutil.copyfile(source, temporary)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    with replacing(path) as file:
        file.write(json.dumps(content).encode())


def load_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def storable(name: str) -> str:
    """Return a name as a valid file name: without folders, and short enough for a file system.

    A changed name ends with a digest, so that it stays unique.
    """
    try:
        coded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate of UTF-16
        coded = name.encode(errors="backslashreplace")
    whole = coded.decode(errors="backslashreplace")
    plain = re.sub(r"[/\0]", "_", whole)
    if plain == whole and len(whole.encode()) <= _LONGEST_NAME and whole.strip("."):
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return plain.encode()[: _LONGEST_NAME - 13].decode(errors="ignore") + "-" + digest


def volume_suffix(path: Path) -> str:
    """The longest suffix of `VOLUMES` that a file or store has, in lower case; empty if none."""
    suffixes = (suffix for kind in VOLUMES.values() for suffix in kind)
    return max((end for end in suffixes if path.name.lower().endswith(end)), key=len, default="")


def volume_name(path: Path) -> str:
    """File name without the suffix of a volume; `.nii.gz` counts as one."""
    return path.name[: len(path.name) - len(volume_suffix(path))]


def file_status(folder: Path, name: str) -> os.stat_result:
    """Stat result of a file inside a folder, which another file names.

    Raises:
        ValueError: not a regular file, or a name or link that leads out of the folder.
        OSError: the file does not exist.
    """
    path = folder / name
    status, end = path.stat(), path.resolve()
    if not end.is_relative_to(folder.resolve()):
        what = "is a link" if path.is_symlink() else "leads"
        raise ValueError(f"{path} {what} out of its folder, to {end}; put the file there")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return status


def check_files(folder: Path) -> None:
    """Check that a folder, of any depth, has only regular files, and no link that leads out.

    Raises:
        ValueError: it has something else.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_files(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                file_status(folder, entry.name)


def check_own(folder: Path) -> int:
    """The mode of a folder with a predictable name, checked to belong to this user.

    Raises:
        ShardError: it belongs to another user, or is not a folder.
        FileNotFoundError: it does not exist.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ShardError(
            f"{folder} is not a folder owned by this user: remove it, or choose another folder"
        )
    return stat.S_IMODE(found.st_mode)


class FileLock:
    """A locked file; released by `close`, or by the end of all processes that have it open.

    Args:
        path: the file.
        wait: wait for another process that holds it.
        create: create the file if it is missing.
        optional: only warn on a file system without locks.

    Attributes:
        descriptor: of the open file; -1 once closed.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        OSError: it cannot be opened, or the file system has no locks (`NO_LOCKS`).
    """

    descriptor = -1

    def __init__(
        self, path: Path, *, wait: bool = False, create: bool = True, optional: bool = False
    ) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while self.descriptor < 0:
            self.descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BaseException as error:
                if not (optional and isinstance(error, OSError) and error.errno in NO_LOCKS):
                    self.close()
                    raise
                warnings.warn(
                    f"the file system of {path.parent} does not support locks: make sure that no "
                    "other process writes there at the same time",
                    stacklevel=2,
                )
            if not is_at(path, self.descriptor):  # it was renamed or removed before it was locked
                self.close()

    def write(self, text: str) -> None:
        """Replace the content of the file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has the name by which it was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a living process holds a `FileLock` on a file."""
    try:
        FileLock(path, create=False).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
