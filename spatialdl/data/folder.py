"""A data set folder that appears whole or not at all.

Everything is written into a hidden sibling of the folder (same file system, so that the last
step is a rename). An interrupted run leaves at most that sibling, which is no data set and
carries the name of what it was to become; the folder itself, old or new, is always whole.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from spatialdl.data.format import MANIFEST, fsync_folder
from spatialdl.errors import ShardError

_OURS = re.compile(r"manifest\.json|shard-\d{5}\.h5|pictures|slides\.csv")


class FolderInProgress:
    """The hidden sibling in which a folder is built; `publish` renames it, `discard` removes it.

    Args:
        target: the folder to be made.
        overwrite: replace a data set that is there; it stays until the new one is whole.

    Raises:
        ShardError: `target` exists and may not be replaced, or its parent cannot be written to.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.target = Path(target).resolve()
        check_target(self.target, overwrite=overwrite)
        self._overwrite = overwrite
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".{self.target.name}.partial-", dir=self.target.parent)
        except OSError as error:
            raise ShardError(f"cannot write beside {self.target}: {error.strerror}") from error
        self.path = Path(made)
        self.path.chmod(0o777 & ~_umask())

    def publish(self) -> None:
        """Give the folder its name; an old data set of that name is removed afterwards."""
        check_target(self.target, overwrite=self._overwrite)
        fsync_folder(self.path)
        old = None
        if self.target.exists():
            old = self.path.with_name(self.path.name.replace(".partial-", ".old-"))
            self.target.rename(old)
        try:
            self.path.rename(self.target)
        except OSError:
            if old is not None:
                old.rename(self.target)
            raise
        fsync_folder(self.target.parent)
        if old is not None:
            shutil.rmtree(old)

    def discard(self) -> None:
        """Remove what was built."""
        shutil.rmtree(self.path, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be replaced: not ours, or ours without `overwrite`.

    Raises:
        ShardError: says what is there and what to do.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ShardError(f"output {target} is a file; name a folder")
    inside = sorted(path.name for path in target.iterdir())
    if not inside:
        return
    if MANIFEST not in inside:
        raise ShardError(
            f"output folder {target} holds {_some(inside)} and is no data set; "
            "name a new or empty folder"
        )
    if not overwrite:
        raise ShardError(
            f"output folder {target} holds a data set already; "
            "name another folder or allow it to be overwritten (--overwrite)"
        )
    foreign = [name for name in inside if not _OURS.fullmatch(name)]
    if foreign:
        raise ShardError(
            f"output folder {target} also holds {_some(foreign)}, which overwriting would "
            "delete; move it away or name another folder"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
