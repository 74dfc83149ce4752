"""Utilisation of an emulated accelerator fed by the loader, as in DLIO."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.bench.io_strategies import draw_image
from spatialdl.data import ShardWriter
from spatialdl.data.codec import Codec
from spatialdl.data.writer import DEFAULT_SHARD_SIZE
from spatialdl.planning.worker import run_worker

AUGMENTED = "raw, augmented"
SETS: dict[str, Codec] = {"raw": "raw", "zstd": "zstd", "jpeg": "jpeg", AUGMENTED: "raw"}
WANTED_AT = "raw", 2
UTILISATION = 0.98
"""Target at `WANTED_AT`."""
_PRESET = "pathology"


def measure(options: argparse.Namespace, folder: Path, tick: Callable[[], object]) -> Any:
    """Utilisation by data set and number of workers."""
    rows = []
    for codec in dict.fromkeys(SETS.values()):
        write_tiles(folder / codec, options.tile, options.steps * options.batch, codec)
    for name, codec in SETS.items():
        for workers in options.workers:
            more = ("--augment", _PRESET) if name == AUGMENTED else ()
            ends = run(folder / codec, options, workers, *more)
            found = utilisation(ends, options.compute, options.skip)
            rows.append({"set": name, "workers": workers, "utilisation": found, "ends": ends})
            tick()
    return rows


def run(
    folder: Path,
    options: argparse.Namespace,
    workers: int,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> list[float]:
    """Run an epoch in a subprocess; returns the end times of the steps in seconds."""
    command = [
        *(sys.executable, "-m", "spatialdl.bench.loader_worker", str(folder)),
        *("--batch", str(options.batch), "--compute", str(options.compute)),
        *("--workers", str(workers), *more),
    ]
    return list(run_worker(command, {**os.environ, **(environment or {})})["ends"])


def utilisation(ends: Sequence[float], compute: float, skip: int) -> float:
    """Compute time / total time, without the first `skip` steps."""
    return compute * (len(ends) - skip) / (ends[-1] - ends[skip - 1])


def write_tiles(
    folder: Path,
    side: int,
    count: int,
    codec: Codec = "raw",
    shard_size: int = DEFAULT_SHARD_SIZE,
) -> None:
    """Write a data set of distinct tiles."""
    image = draw_image(side)
    with ShardWriter(folder, codec=codec, shard_size=shard_size) as writer:
        for number in range(count):
            writer.add(np.roll(image, 7 * number, axis=1))
