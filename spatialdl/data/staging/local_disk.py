"""Which disk of the node is staged to, and how much room it has."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from spatialdl.data.raw_reading import file_system, is_local

_RESERVE = 2**30  # bytes that stay free ...
_RESERVED_SHARE = 20  # ... or one part in so many of a small disk
_MEMORY = ("tmpfs", "ramfs")


class DiskSpace:
    """The free space of a disk that others write to as well.

    Args:
        folder: any on that disk.
        keep_free: bytes that stay free; by default 1 GiB, or 5 % of a disk that is smaller than
            20 GiB.
    """

    def __init__(self, folder: Path, keep_free: int | None = None) -> None:
        self._folder, self._keep_free = folder, keep_free
        self._promised = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What may be written now, besides what was promised; below zero if not even that.

        Raises:
            OSError: the disk cannot be asked.
        """
        disk = os.statvfs(self._folder)
        keep = self._keep_free
        if keep is None:
            keep = min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVED_SHARE)
        return disk.f_bavail * disk.f_frsize - keep - self._promised

    def promise(self, count: int) -> bool:
        """Set room aside for a file; False if there is not enough."""
        with self._lock:
            if self.bytes < count:
                return False
            self._promised += count
            return True

    def release(self, count: int) -> None:
        """Hear that bytes of a promise were written, or are not needed any more."""
        with self._lock:
            self._promised -= count


def find_disk(environment: Mapping[str, str] | None = None) -> tuple[Path | None, str]:
    """The first usual folder for temporary files that is on a disk of this node.

    Args:
        environment: variables, by default those of the process.

    Returns:
        The folder, or None, and why those before it were not taken.
    """
    environment = os.environ if environment is None else environment
    places = [environment.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    reasons: list[str] = []
    for place in [*filter(None, places), "/local/scratch", "/tmp"]:
        reason = why_not(Path(place))
        if reason is None:
            return Path(place), "; ".join(reasons)
        reasons.append(f"{place} {reason}")
    return None, "; ".join(reasons)


def why_not(folder: Path) -> str | None:
    """What speaks against a folder that nobody has chosen; None if it will do."""
    if not folder.is_dir():
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    kind = file_system(folder)
    if kind in _MEMORY:
        return f"is memory ({kind})"
    if not is_local(folder):
        return f"is on a network file system ({kind or 'unknown'})"
    return "has no room" if DiskSpace(folder).bytes <= 0 else None
