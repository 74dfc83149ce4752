"""Writing a data set of raw tiles, against the same bytes in one file; both synced."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.bench.io_strategies import Pixels, draw_image
from spatialdl.bench.results import median_ratio
from spatialdl.data import ShardWriter

FILE, OURS = "one file", "ShardWriter"
WAYS = (FILE, OURS)
OF_FILE = 0.8
"""Target: rate of writing shards, relative to one file."""
ROUNDS = 3
_DISTINCT = 16


def measure(
    options: argparse.Namespace, folder: Path, tick: Callable[[], object]
) -> dict[str, Any]:
    """MB per second of wall time, in alternating rounds."""
    image = draw_image(options.tile)
    tiles = [np.roll(image, 7 * number, axis=1) for number in range(_DISTINCT)]
    size = options.written * image.nbytes
    writes = {FILE: _write_file, OURS: _write_shards}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, write in writes.items():
            os.sync()  # pending writes of other processes are not measured
            before = time.perf_counter()
            write(tiles, options, folder / "written")
            rates[way].append(size / 1e6 / (time.perf_counter() - before))
            shutil.rmtree(folder / "written")
            tick()
    return {
        "mb": size / 1e6,
        "shards": -(-options.written // max(1, options.shard // image.nbytes)),
        "rates": {way: statistics.median(rates[way]) for way in WAYS},
        "ratio": median_ratio(rates[OURS], rates[FILE]),
        "rounds": rates,
    }


def _write_file(tiles: Sequence[Pixels], options: argparse.Namespace, folder: Path) -> None:
    folder.mkdir()
    with (folder / "file").open("xb", buffering=0) as file:
        for number in range(options.written):
            file.write(tiles[number % _DISTINCT].data)
        os.fsync(file.fileno())


def _write_shards(tiles: Sequence[Pixels], options: argparse.Namespace, folder: Path) -> None:
    with ShardWriter(folder, shard_size=options.shard) as writer:
        for number in range(options.written):
            writer.add(tiles[number % _DISTINCT])
