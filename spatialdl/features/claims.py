"""Dynamic distribution of slides: an idle worker claims the next slide, largest first.

A claim is made by creating a folder, which succeeds for exactly one worker, also on shared file
systems. No worker waits for another, and there is no coordinator.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

_PREFIX = ".claims-"


class Claims:
    """The claims of a run on its slides; cheap to pickle.

    Args:
        folder: folder created by `new_claims`.
        count: number of slides.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count, self._next = folder, count, 0

    def take(self) -> int | None:
        """Claim a slide and return its number; None if no slide is left."""
        while self._next < self._count:
            number, self._next = self._next, self._next + 1
            try:
                (self._folder / str(number)).mkdir()
            except FileExistsError:
                continue
            return number
        return None

    def taken(self) -> int:
        """Number of slides claimed by all workers."""
        return len(list(self._folder.iterdir()))

    def remove(self) -> None:
        """Remove the folder, after all workers have finished."""
        shutil.rmtree(self._folder, ignore_errors=True)


def new_claims(out: Path, count: int) -> Claims:
    """Create the claims of a new run, and remove those of killed runs."""
    for left in out.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Claims(Path(mkdtemp(prefix=_PREFIX, dir=out)), count)
