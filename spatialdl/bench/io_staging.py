"""An epoch during staging to a local disk, against one with staged shards."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spatialdl.bench.io_loader import run, write_tiles
from spatialdl.bench.slow_source import environment

STAGED, STAGING, SOURCE = "staged before", "staging meanwhile", "from the source"
WAYS = (STAGED, STAGING, SOURCE)
TO_STAGED = 1.05
"""Target: largest time of an epoch of `STAGING`, relative to `STAGED`."""
WORKERS = 2


def measure(options: argparse.Namespace, folder: Path, tick: Callable[[], object]) -> Any:
    """Seconds of an epoch, and bytes read from the slow source, by strategy."""
    source = folder / "source"
    count = options.epoch * options.batch
    write_tiles(source, options.tile, count, shard_size=options.shard)
    rows: list[dict[str, Any]] = []
    for number, way in enumerate(WAYS):
        work, disk = folder / f"slow-{number}", folder / f"disk-{number}"
        work.mkdir()
        server, slow = environment(source, options.rate * 1e6, work)
        stage = [] if way == SOURCE else ["--stage", str(disk)]
        waits = ["--staged"] if way == STAGED else []
        # the default on network file systems
        ends = run(source, options, WORKERS, "--io", "pread", *stage, *waits, environment=slow)
        rows.append({"way": way, "seconds": ends[-1], "served": server.served(), "ends": ends})
        tick()
    seconds = {row["way"]: row["seconds"] for row in rows}
    return {
        "mb": count * 3 * options.tile**2 / 1e6,
        "rows": rows,
        "ratio": seconds[STAGING] / seconds[STAGED],
    }
