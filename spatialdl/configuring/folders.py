"""``${new_folder:...}`` of the configuration: a folder that nobody else has."""

from __future__ import annotations

from itertools import count
from pathlib import Path


def new_folder(name: str) -> str:
    """Make a folder of this name; if there is one, name-2, name-3 ...

    Two runs that begin in the same second, as those of a job array do, so get one each: of several
    processes, on whatever machines, one makes a folder.
    """
    for number in count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        break
    return str(path)
