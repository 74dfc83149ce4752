"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from spatialdl.data.format import fsync_folder


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; at the end of the block it gets its own.

    A file of that name stays until then, and where the block raises. Several processes may write
    the same file: the last has it.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # a long name leaves no room for more
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
