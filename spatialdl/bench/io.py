"""Reading, loading, staging and writing of data sets, with targets.

Boxes of one image are read in all formats, with warm and cold page cache; the loader feeds an
emulated accelerator, which sleeps as in DLIO; an epoch is staged from a slow source; shards are
written; a box of a giant image is read.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
from tqdm import tqdm

from spatialdl.bench import io_loader, io_memory, io_reading, io_staging, io_writing
from spatialdl.bench.io_report import draw, table
from spatialdl.bench.results import machine, origin, parser_of, publish
from spatialdl.text import size_in_bytes

Measure = Callable[[argparse.Namespace, Path, Callable[[], object]], Any]
PARTS: dict[str, Measure] = {
    "reading": io_reading.measure,
    "feeding": io_loader.measure,
    "staging": io_staging.measure,
    "writing": io_writing.measure,
    "memory": lambda options, folder, _: io_memory.measure(options, folder),
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    result: dict[str, Any] = {
        **origin("io", arguments),
        "machine": f"{machine()}, HDF5 {h5py.version.hdf5_version}",
        "options": {**vars(options), "parts": list(options.parts)},
    }
    with tqdm(total=sum(_ticks(options).values()), unit="run") as bar:
        for part in options.parts:
            bar.set_postfix_str(part)
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                result[part] = PARTS[part](options, Path(name), bar.update)
    publish(result, table, draw, Path(options.out) / "io")


def _ticks(options: argparse.Namespace) -> dict[str, int]:
    """Progress ticks of each part."""
    known = {
        "reading": io_reading.ticks(options),
        "feeding": len(io_loader.SETS) * len(options.workers),
        "staging": len(io_staging.WAYS),
        "writing": len(io_writing.WAYS) * io_writing.ROUNDS,
        "memory": 0,
    }
    return {part: known[part] for part in options.parts}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("io", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    add("--side", type=int, default=8192, help="side of the image to read (%(default)s)")
    add("--boxes", type=int, default=100, help="boxes per kind and round (%(default)s)")
    add("--rounds", type=int, default=7, help="rounds with warm page cache (%(default)s)")
    add("--tile", type=int, default=1024, help="side of the tiles of data sets (%(default)s)")
    add("--batch", type=int, default=4, help="tiles per step (%(default)s)")
    add("--compute", type=float, default=0.3, help="seconds of compute per step (%(default)s)")
    add("--workers", type=int, nargs="+", default=[0, 1, 2], help="reader processes (0 1 2)")
    add("--steps", type=int, default=24, help="loader steps (%(default)s)")
    add("--skip", type=int, default=4, help="loader steps of warm-up (%(default)s)")
    add("--epoch", type=int, default=100, help="steps of a staged epoch (%(default)s)")
    add("--rate", type=float, default=50, help="rate of the slow source, MB/s (%(default)s)")
    add("--shard", type=size_in_bytes, default="128M", help="size of shards (%(default)s)")
    add("--written", type=int, default=340, help="tiles to write (%(default)s)")
    add("--giant", type=int, default=100_000, help="side of the giant image (%(default)s)")
    add("--folder", help="folder for temporary files (that of the system)")
    options = parser.parse_args(arguments)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for name in ("boxes", "rounds", "tile", "batch", "skip", "epoch", "written", "rate"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1")
    if options.side < io_reading.WINDOW:
        raise ValueError(f"side {options.side} is smaller than a window of {io_reading.WINDOW}")
    if options.giant < io_memory.BOX:
        raise ValueError(f"giant {options.giant} is smaller than a box of {io_memory.BOX}")
    if options.steps <= options.skip:
        raise ValueError(f"steps {options.steps} must be more than the {options.skip} skipped")
    if options.compute <= 0:
        raise ValueError("compute must be more than 0 seconds")
    if min(options.workers) < 0:
        raise ValueError("workers must be 0 or more")
