"""Checks of files and folders that another user may have created.

Names with `..` are rejected where names are read, but a link can also lead out of the folder, and
opening a pipe blocks forever. In a folder that is writable by all, such as /tmp, another user may
have created a folder under our name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spatialdl.errors import ShardError


def file_status(folder: Path, name: str) -> os.stat_result:
    """Stat result of a file inside a folder.

    Raises:
        ValueError: not a regular file, or a link that leads out of the folder.
        OSError: the file does not exist.
    """
    path = folder / name
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        end = path.resolve()
        if not end.is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link out of its folder, to {end}; put the file there")
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return status


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
