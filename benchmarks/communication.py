"""Halo exchanges and all-reduces of spatialdl against hand-written ones and other backends.

All variants run in one job, in a random order each round. ``--halo``: the exchange of a 3 x 3
convolution, against hand-written exchanges of the same bytes. ``--all-reduce``: the ``mpi4py``
backend of torch.distributed against gloo or NCCL and plain mpi4py. Both by default.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Bars,
    Lines,
    add_device,
    add_numbers,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    run_ranks,
    start,
)

HALO, NEW_STRIPS = "spatialdl", "spatialdl, new strips"
NOTHING, MEMCPY = "no communication", "memcpy"
NOT_BY_HAND = (HALO, NEW_STRIPS, NOTHING, MEMCPY)
TARGET = 1.3
"""Largest time of our exchange, relative to the best hand-written one."""
OURS, RAW, CALL = "mpi4py backend", "raw mpi4py", "PyTorch's call"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    rows, cols = options.grid
    found = run_ranks("communication_worker", options, rows * cols, show=True)
    mpi = found["mpi"].split(",")[0].strip()
    result = {
        **origin("communication", arguments, found["device"]),
        **{"mpi": mpi, "options": vars(options)},
    }
    lines: list[str] = []
    panels: list[Bars | Lines] = []
    if options.halo:
        result["halo"] = summarise_halo(found["halo"])
        lines += table_of_halo(result)
        panels.append(_panel_of_halo(result["halo"]))
    if options.all_reduce and "all_reduce" in found:
        result["all_reduce"] = summarise_sums(found["all_reduce"], found["other"])
        lines += ["", *table_of_sums(result["all_reduce"], found["other"])]
        panels.append(_panel_of_sums(result["all_reduce"], found["other"]))
    elif options.all_reduce:
        lines += ["", f"no all-reduces: {found['other']}"]
    publish(result, lines, panels, Path(options.out) / f"communication-{rows}x{cols}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("communication", __doc__)
    add = parser.add_argument
    add("--halo", action="store_true", help="only halo exchanges")
    add("--all-reduce", action="store_true", help="only all-reduces")
    add("--grid", type=int, nargs=2, default=[2, 2], metavar=("ROWS", "COLS"), help="(2 2)")
    add_numbers(
        parser,
        channels=(64, 1, "channels of a tile"),
        side=(256, 1, "side of a tile"),
        most=(4**13, 4, "bytes of the largest all-reduce"),
        rounds=(60, 2, "rounds of all variants"),
        exchanges=(10, 1, "exchanges per measurement"),
    )
    add_device(parser)
    options = parser.parse_args(arguments)
    if min(options.grid) < 1 or options.grid == [1, 1]:
        parser.error(f"--grid {options.grid} has no halo: use at least 2 ranks")
    if not options.halo and not options.all_reduce:
        options.halo = options.all_reduce = True
    return options


def summarise_halo(found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and of ratios to the best hand-written variant per round."""
    seconds: dict[str, list[float]] = found["seconds"]
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((n for n in median if n not in NOT_BY_HAND), key=lambda name: median[name])
    ratio = {name: median_ratio(times, seconds[best]) for name, times in seconds.items()}
    return {**found, "median": median, "best": best, "ratio": ratio}


def table_of_halo(result: dict[str, Any]) -> list[str]:
    """Table of microseconds of an exchange, and ratios to the best hand-written variant."""
    found, (rows, cols) = result["halo"], result["options"]["grid"]
    cells = []
    for name, times in found["seconds"].items():
        low, middle, high = (1e6 * value for value in statistics.quantiles(times, n=4))
        ratio = f"{found['ratio'][name]:.2f}"
        cells.append([name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", ratio])
    took = f"; we took: {found['way']}" if found["way"] else ""
    return [
        f"{rows}x{cols} ranks, float32, {found['bytes'] / 1024:.3g} KB per rank{took}",
        "",
        *markdown(["", "median, us", "quartiles, us", "ratio"], cells),
        "",
        f"ratio: to the best by hand ({found['best']}), median over the rounds",
    ]


def _panel_of_halo(found: dict[str, Any]) -> Bars:
    values = {name: [1e6 * s for s in times] for name, times in found["seconds"].items()}
    texts = {
        name: f"{1e6 * found['median'][name]:.0f}, {found['ratio'][name]:.2f}" for name in values
    }
    title = f"halo exchange, us, and ratio to the best by hand; dashed: {TARGET} times that"
    mark = TARGET * 1e6 * found["median"][found["best"]]
    return Bars(title, values, texts, NOT_BY_HAND[:2], mark)


def summarise_sums(found: dict[str, dict[str, list[float]]], other: str) -> dict[str, Any]:
    """Medians by size in bytes, and medians of differences and ratios per round."""
    return {
        size: {
            "us": {name: 1e6 * statistics.median(times) for name, times in seconds.items()},
            "above_raw_us": statistics.median(
                1e6 * (a - b) for a, b in zip(seconds[OURS], seconds[RAW], strict=True)
            ),
            "to_other": median_ratio(seconds[other], seconds[OURS]),
            "seconds": seconds,
        }
        for size, seconds in found.items()
    }


def table_of_sums(sizes: dict[str, Any], other: str) -> list[str]:
    """Table of microseconds of an all-reduce by size."""
    titles = ["all-reduce, us", OURS, RAW, other, "above raw", CALL, f"{other} / ours"]
    rows = []
    for size, found in sizes.items():
        times = (found["us"][name] for name in (OURS, RAW, other))
        numbers = (*times, found["above_raw_us"], found["us"][CALL])
        rows.append([words(int(size)), *(f"{x:.1f}" for x in numbers), f"{found['to_other']:.2f}"])
    about = f"{CALL}: overhead of PyTorch with an empty process group in Python"
    return [*markdown(titles, rows), "", about]


def _panel_of_sums(sizes: dict[str, Any], other: str) -> Lines:
    curves = {
        name: [(float(size), found["us"][name]) for size, found in sizes.items()]
        for name in (OURS, RAW, other)
    }
    return Lines("all-reduce", "bytes", "microseconds", curves, "xy")


def words(size: int) -> str:
    """Bytes with a unit."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    start(main)
