"""Files of a folder that somebody else may have made, and none of other folders.

A name with `..` is refused where names are read; a link may lead elsewhere just as well, and
opening a pipe waits for ever.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
