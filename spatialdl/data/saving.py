"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
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

    A file of that name stays until then, and where the block raises. Several processes may write
    the same file: the last has it. Nobody else can look into what is not finished.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # a long name leaves no room for more
    try:
        with temporary.open("xb") as file:
            usual = os.fstat(file.fileno()).st_mode
            with suppress(OSError):  # some file systems know no modes
                os.fchmod(file.fileno(), 0o600)
            yield file
            with suppress(OSError):
                os.fchmod(file.fileno(), usual)
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def settle(temporary: Path, path: Path) -> None:
    """Give a file that is written its name, when all of it is on the disk."""
    sync(temporary)
    temporary.replace(path)
    fsync_folder(path.parent)


def sync(path: Path) -> None:
    """Return when all of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no such thing."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        temporary = target.with_name(f".{uuid4().hex}.tmp")
        shutil.copyfile(source, temporary)
        settle(temporary, target)


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
