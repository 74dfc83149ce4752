"""Which worker takes which slide: the next free worker takes the next, the largest first.

A claim is a folder that is made: one worker succeeds, also on file systems of several machines.
No worker waits for another, and none hands out work.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

_PREFIX = ".claims-"


class Claims:
    """The slides of a run that are still to be taken; small enough to be sent to workers.

    Args:
        folder: that `new_claims` made.
        count: slides.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count, self._next = folder, count, 0

    def take(self) -> int | None:
        """The number of a slide that no other worker has taken; None if there is none."""
        while self._next < self._count:
            number, self._next = self._next, self._next + 1
            try:
                (self._folder / str(number)).mkdir()
            except FileExistsError:
                continue
            return number
        return None

    def taken(self) -> int:
        """How many slides were taken by all workers."""
        return len(list(self._folder.iterdir()))

    def remove(self) -> None:
        """Remove the folder, when all workers are done."""
        shutil.rmtree(self._folder, ignore_errors=True)


def new_claims(out: Path, count: int) -> Claims:
    """Claims of a new run; those of killed ones are removed."""
    for left in out.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Claims(Path(mkdtemp(prefix=_PREFIX, dir=out)), count)
