"""File systems: the disk of the node for staging, and its free space."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

_RESERVE = 2**30  # bytes that stay free ...
_RESERVED_SHARE = 20  # ... or 1/20 of a small disk
_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"),
    *("tmpfs", "ramfs", "rootfs", "overlay", "aufs", "squashfs", "erofs", "iso9660", "exfat"),
}


class DiskSpace:
    """The free space of a disk that other processes also write to.

    Args:
        folder: any folder on that disk.
        keep_free: bytes that stay free; by default 1 GiB, or 5 % of a disk that is smaller than
            20 GiB.
    """

    def __init__(self, folder: Path, keep_free: int | None = None) -> None:
        self._folder, self._keep_free = folder, keep_free
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes available besides reservations; negative if they exceed the free space.

        Raises:
            OSError: the disk cannot be queried.
        """
        disk = os.statvfs(self._folder)
        keep = self._keep_free
        if keep is None:
            keep = min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVED_SHARE)
        return disk.f_bavail * disk.f_frsize - keep - self._reserved

    def reserve(self, count: int) -> bool:
        """Reserve space for a file; false if there is not enough."""
        with self._lock:
            if self.bytes < count:
                return False
            self._reserved += count
            return True

    def release(self, count: int) -> None:
        """Release reserved bytes that were written or are no longer needed."""
        with self._lock:
            self._reserved -= count


def find_disk(environment: Mapping[str, str] | None = None) -> tuple[Path | None, str]:
    """Find the first usual folder for temporary files on a disk of this node.

    Args:
        environment: variables, by default those of the process.

    Returns:
        The folder or None, and why earlier candidates were rejected.
    """
    environment = os.environ if environment is None else environment
    places = [environment.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    reasons: list[str] = []
    for place in [*filter(None, places), "/local/scratch", "/tmp"]:
        reason = unsuitable(Path(place))
        if reason is None:
            return Path(place), "; ".join(reasons)
        reasons.append(f"{place} {reason}")
    return None, "; ".join(reasons)


def unsuitable(folder: Path) -> str | None:
    """Why a folder is unsuitable as a default; None if it is suitable."""
    if not folder.is_dir():
        return "is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable"
    kind = file_system(folder)
    if kind in _MEMORY:
        return f"is memory ({kind})"
    if not is_local(folder):
        return f"is on a network file system ({kind or 'unknown'})"
    return "has no space left" if DiskSpace(folder).bytes <= 0 else None


def is_local(path: Path) -> bool:
    """Whether a file is on a local file system; False if unknown."""
    return file_system(path) in _LOCAL


def file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system of a file, such as "ext4" or "lustre"; None if unknown.

    Args:
        path: the file.
        mounts: the mount table (proc_pid_mountinfo(5)), available on Linux.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    real = path.resolve()
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        # Of two mounts at one point, the later one hides the earlier one.
        if real.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), right.split()[0]
    return None if found is None else found[1]


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
