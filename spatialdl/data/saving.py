"""Files that are there whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

TEMPORARY = ".*.tmp"
"""Names, as a glob has them, of what a killed process leaves; nobody reads it."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system that has no locks says."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; at the end of the block it gets its own.

    As `unfinished`, for what can write to an open file.
    """
    with unfinished(path) as temporary, temporary.open("r+b") as file:
        yield file


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A temporary name, of an empty file; at the end of the block the file gets its own name.

    A file of that name stays until then, and where the block raises. Several processes may write
    the same file: the last has it. Nobody else can look into what is not finished.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # a long name leaves no room for more
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield temporary
        show(temporary)
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def show(path: Path) -> None:
    """Let others look into a file or a folder of ours, as far as they may into any new one."""
    with suppress(OSError):  # some file systems know no modes
        before = path.stat().st_mode
        usual = 0o777 if stat.S_ISDIR(before) else 0o666
        path.chmod(before & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) | usual & ~_umask())


def _umask() -> int:
    """What new files are not allowed: os.umask would have to change it, for all threads."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        [umask] = [line.split()[1] for line in status.splitlines() if line.startswith("Umask:")]
        return int(umask, 8)
    except (OSError, ValueError):  # not Linux, or an old one
        before = os.umask(0o077)
        os.umask(before)
        return before


def settle(temporary: Path, path: Path) -> None:
    """Give a file that is written its name, when all of it is on the disk."""
    sync(temporary)
    temporary.replace(path)
    fsync_folder(path.parent)


def sync(path: Path) -> None:
    """Return when all of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_table(
    path: Path, head: Iterable[str], rows: Iterable[Iterable[object]], errors: str = "strict"
) -> None:
    """Write a CSV file in UTF-8, whole or not at all.

    Args:
        errors: what becomes of a file name's bytes that are no text, see ``codecs``.
    """
    with replacing(path) as out:
        text = io.TextIOWrapper(out, encoding="utf-8", errors=errors, newline="")
        table = csv.writer(text)
        table.writerow(head)
        table.writerows(rows)
        text.flush()
        text.detach()


def link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no such thing."""
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
    """Write what `json` takes to a file, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(content).encode())


def load_json(path: Path) -> Any:
    """What a file holds; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
