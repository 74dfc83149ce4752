"""How the files of a folder are spread over the storage targets of a Lustre file system.

A file keeps the layout of the folder in which it is made, so that it is set before anything is
written. Each of many shards is best on one target; a single large file on many.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spatialdl.data.raw_reading import MOUNTS, file_system
from spatialdl.errors import ShardError

_SMALLEST = 2**16  # bytes; stripes of Lustre are a multiple of it


@dataclass(frozen=True)
class Striping:
    """A layout; what is None is left to the file system.

    Attributes:
        count: storage targets of a file; -1 takes all.
        size: bytes that go to a target before the next has its turn, a multiple of 64K.

    Raises:
        ValueError: there are no such layouts.
    """

    count: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        """Check it."""
        if self.count is not None and self.count != -1 and not 1 <= self.count <= 2000:
            raise ValueError(f"stripe count is {self.count}, expected 1 to 2000, or -1 for all")
        if self.size is not None and (self.size < _SMALLEST or self.size % _SMALLEST):
            raise ValueError(f"stripe size is {self.size} bytes, expected a multiple of 64K")

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return self.count is not None or self.size is not None

    def apply(self, folder: Path, mounts: Path = MOUNTS) -> str | None:
        """Have files that will be made in a folder laid out so.

        Args:
            folder: on whatever file system.
            mounts: the table of mounts, see `file_system`.

        Returns:
            A sentence where it could not be done, which costs speed at most; else None.

        Raises:
            ShardError: `lfs setstripe` refused.
        """
        if not self:
            return None
        kind = file_system(folder, mounts)
        if kind != "lustre":
            where = "an unknown file system" if kind is None else kind
            return f"stripes were not set: {folder.parent} is on {where}, not on Lustre"
        command = shutil.which("lfs")
        if command is None:
            return f"stripes were not set: {folder.parent} is on Lustre, and there is no lfs here"
        options = [] if self.count is None else ["-c", str(self.count)]
        options += [] if self.size is None else ["-S", str(self.size)]
        done = subprocess.run(
            [command, "setstripe", *options, str(folder)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise ShardError(f"lfs setstripe {' '.join(options)} {folder} failed: {said}")
        return None
