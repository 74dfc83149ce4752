"""Data: sharded sets of images, written once, read by boxes.

A data set is a folder with ``manifest.json`` and HDF5 files. Images are arrays (rows, columns,
channels), masks (rows, columns), boxes half-open (row0, row1, col0, col1) in pixels; what is
missing, damaged or of another kind raises `spatialdl.ShardError`.

What writes them, and what decodes slides, has no use for PyTorch, so the names are looked up when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spatialdl.data.joining import join_parts
    from spatialdl.data.shards import ShardDataset
    from spatialdl.data.writer import ShardWriter

__all__ = ["ShardDataset", "ShardWriter", "join_parts"]

_FOUND_IN = {
    "ShardDataset": "spatialdl.data.shards",
    "ShardWriter": "spatialdl.data.writer",
    "join_parts": "spatialdl.data.joining",
}


def __getattr__(name: str) -> object:
    """Look a name up when it is first used."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FOUND_IN[name]), name)
    return value
