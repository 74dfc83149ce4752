"""Memory of opening a data set with one giant image and reading a box of it.

The shard is a sparse file: all chunks are allocated, but only those of the box are written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import CHUNK, MANIFEST
from spatialdl.planning.worker import run_worker

BOX = 1024
LIMIT = 200.0
"""Target: MB to read a box, in addition to the imports."""
_VALUE = 7


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Peak MB of a process before opening the data set, and after reading the box."""
    write_giant(folder / "giant", options.giant)
    command = [sys.executable, "-m", "spatialdl.bench.io_memory", str(folder / "giant")]
    return run_worker(command, os.environ)


def write_giant(folder: Path, side: int) -> None:
    """Write a region of `side` x `side` with data only in a box in its middle."""
    with ShardWriter(folder, kind="regions") as writer:
        writer.add(np.zeros((1, 1, 3), np.uint8))
    shard = next(folder.glob("*.h5"))
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk((CHUNK, CHUNK, 3))
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(shard, "w", libver="earliest") as file:
        group = file.create_group("regions/000000")
        space = h5py.h5s.create_simple((side, side, 3))
        data = h5py.h5d.create(group.id, b"image", h5py.h5t.STD_U8LE, space, layout)
        chunk = np.full((CHUNK, CHUNK, 3), _VALUE, np.uint8)
        begin = _middle(side) // CHUNK * CHUNK
        for row in range(begin, _middle(side) + BOX, CHUNK):
            for col in range(begin, _middle(side) + BOX, CHUNK):
                data.write_direct_chunk((row, col, 0), chunk)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    manifest["samples"][0] |= {"height": side, "width": side}
    manifest["samples"][0]["bands"][0]["rows"] = side
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _middle(side: int) -> int:
    """First row, and column, of the box."""
    return (side - BOX) // 2


def _peak_mb() -> float:
    """Peak resident set since `_forget_peak`; `getrusage` would include that of the parent."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(folder: Path) -> None:
    _forget_peak()
    before = _peak_mb()
    data = ShardDataset(folder)
    side, _ = data.image_size(0)
    begin = _middle(side)
    box = data.read(0, (begin, begin + BOX, begin, begin + BOX))
    after = _peak_mb()
    if not (box == _VALUE).all():
        raise RuntimeError("the box has other pixels than were written")
    print(json.dumps({"side": side, "imports": before, "peak": after, "mb": after - before}))


if __name__ == "__main__":
    _read(Path(sys.argv[1]))
