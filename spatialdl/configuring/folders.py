"""Resolver ``${new_folder:...}`` of the configuration: a new, unused folder."""

from __future__ import annotations

from itertools import count
from pathlib import Path


def new_folder(name: str) -> str:
    """Create a folder of this name; if it exists, name-2, name-3 ...

    Creation is atomic: runs that start in the same second, such as those of a job array, get a
    folder each, also from several machines.
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
