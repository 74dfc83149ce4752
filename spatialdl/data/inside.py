"""Files of a folder that somebody else may have made, and none of other folders.

A name with `..` is refused where names are read; a link may lead elsewhere just as well, and
opening a pipe waits for ever. And in a folder where anybody may write, as in /tmp, somebody else
may have made what has the name of ours.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spatialdl.errors import ShardError


def file_status(folder: Path, name: str) -> os.stat_result:
    """What the file system says of a file.

    Raises:
        ValueError: it is no file, or a link that leads out of the folder.
        OSError: it is not there.
    """
    path = folder / name
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        end = path.resolve()
        if not end.is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link out of its folder, to {end}; put the file there")
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no file")
    return status


def check_own(folder: Path) -> int:
    """The mode of a folder of this user, under a name that others can guess.

    Raises:
        ShardError: it is somebody else's, or no folder.
        FileNotFoundError: it is not there.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ShardError(f"{folder} is not a folder of yours: remove it, or name another folder")
    return stat.S_IMODE(found.st_mode)
