"""Striping of a folder's files over the storage targets of a Lustre file system.

A file inherits the layout of its folder on creation, so the layout is set before files are written.
With many shards, one target each is best; with a single large file, many.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spatialdl.data.raw_reading import MOUNTS, file_system
from spatialdl.errors import ShardError

_SMALLEST = 2**16  # bytes; Lustre stripe sizes are multiples of it


@dataclass(frozen=True)
class Striping:
    """A layout; None values are left to the file system.

    Attributes:
        count: storage targets per file; -1 for all.
        size: bytes per stripe, a multiple of 64K.

    Raises:
        ValueError: invalid count or size.
    """

    count: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        """Validate the layout."""
        if self.count is not None and self.count != -1 and not 1 <= self.count <= 2000:
            raise ValueError(f"stripe count is {self.count}, expected 1 to 2000, or -1 for all")
        if self.size is not None and (self.size < _SMALLEST or self.size % _SMALLEST):
            raise ValueError(f"stripe size is {self.size} bytes, expected a multiple of 64K")

    def __bool__(self) -> bool:
        """Whether any value is set."""
        return self.count is not None or self.size is not None

    def apply(self, folder: Path, mounts: Path = MOUNTS) -> str | None:
        """Set the layout of files that will be created in a folder.

        Args:
            folder: a folder on any file system.
            mounts: the mount table, see `file_system`.

        Returns:
            A message if it was not possible, which costs at most speed; else None.

        Raises:
            ShardError: `lfs setstripe` failed.
        """
        if not self:
            return None
        kind = file_system(folder, mounts)
        if kind != "lustre":
            where = "an unknown file system" if kind is None else kind
            return f"stripes were not set: {folder.parent} is on {where}, not on Lustre"
        command = shutil.which("lfs")
        if command is None:
            return f"stripes were not set: {folder.parent} is on Lustre, but lfs was not found"
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
            output = " ".join((done.stderr or done.stdout).split())
            raise ShardError(f"lfs setstripe {' '.join(options)} {folder} failed: {output}")
        return None
