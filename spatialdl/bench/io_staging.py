"""An epoch whose shards are copied to a local disk meanwhile, beside one that has them there."""

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
"""What an epoch of `STAGING` may take of one of `STAGED`."""
WORKERS = 2


def measure(options: argparse.Namespace, folder: Path, tick: Callable[[], object]) -> Any:
    """Seconds of an epoch, and what was read of the slow source meanwhile, in each way."""
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
        # a file server's files are read so
        ends = run(source, options, WORKERS, "--io", "pread", *stage, *waits, environment=slow)
        rows.append({"way": way, "seconds": ends[-1], "served": server.served(), "ends": ends})
        tick()
    seconds = {row["way"]: row["seconds"] for row in rows}
    return {
        "mb": count * 3 * options.tile**2 / 1e6,
        "rows": rows,
        "ratio": seconds[STAGING] / seconds[STAGED],
    }
