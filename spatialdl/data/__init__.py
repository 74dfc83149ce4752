"""Data: sharded image data sets, written once and read by boxes.

A data set is a folder with ``manifest.json`` and HDF5 files. Images are arrays (rows, columns,
channels), masks (rows, columns), boxes half-open (row0, row1, col0, col1) in pixels. Missing or
damaged files and unknown versions raise `spatialdl.ShardError`.

In the order in which to read: `format.py` and `samples.py` (manifest and files), `shards.py` (a box
of a sample; `chunk_reading.py` reads only chunks under it), `writer.py` (with `tile_shard.py` and
`region_shard.py`), `image_source.py` (what training reads from: shards, `dataset_source.py`,
`bags.py`, `synthetic.py`), `views.py` (crops, padding, `augmentation/`), `loader.py` and
`workers.py` (batches of a rank), `tables.py` (tables of slides and labels), `outcomes.py` (what
became of each input of a command), `importing/`, `staging/`.

Names are imported lazily: writing data sets and decoding slides do not need PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spatialdl.data.joining import join_parts
    from spatialdl.data.shards import ShardDataset
    from spatialdl.data.writer import ShardWriter

__all__ = ["ShardDataset", "ShardWriter", "join_parts"]

_MODULES = {
    "ShardDataset": "spatialdl.data.shards",
    "ShardWriter": "spatialdl.data.writer",
    "join_parts": "spatialdl.data.joining",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
