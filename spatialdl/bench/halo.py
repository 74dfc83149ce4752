"""Halo exchange of spatialdl against hand-written exchanges of the same bytes."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spatialdl.bench.device import add_device, worker_command
from spatialdl.bench.results import (
    CPU,
    heading,
    markdown,
    median_ratio,
    origin,
    parser_of,
    place,
    publish,
    save,
    words_of,
)
from spatialdl.planning.worker import environment, run_worker

OURS = ("spatialdl", "spatialdl, new strips")
BOUNDS = ("no communication", "memcpy")
TARGET = 1.3


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    rows, cols = options.grid
    command = worker_command("halo_worker", rows * cols, options)
    result = summarise(options, run_worker(command, environment(1)))
    name = f"halo-{rows}x{cols}-{options.channels}x{options.side}"
    publish(result, table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("halo", __doc__)
    parser.add_argument(
        "--grid", type=int, nargs=2, default=[2, 2], metavar=("ROWS", "COLS"), help="(2 2)"
    )
    parser.add_argument("--channels", type=int, default=64, help="channels of a tile (%(default)s)")
    parser.add_argument("--side", type=int, default=256, help="side of a tile (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=60, help="rounds of all variants (%(default)s)"
    )
    parser.add_argument(
        "--exchanges", type=int, default=10, help="exchanges per measurement (%(default)s)"
    )
    add_device(parser)
    options = parser.parse_args(arguments)
    if min(*options.grid, options.channels, options.side, options.rounds, options.exchanges) < 1:
        raise ValueError("grid, channels, side, rounds and exchanges must be at least 1")
    if options.grid == [1, 1]:
        raise ValueError("a grid of 1x1 has no halo: use at least 2 ranks")
    return options


def summarise(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and of ratios to the best hand-written variant per round."""
    seconds: dict[str, list[float]] = found["seconds"]
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((n for n in median if n not in OURS + BOUNDS), key=lambda name: median[name])
    ratios = {name: median_ratio(times, seconds[best]) for name, times in seconds.items()}
    return {
        **origin("halo", words_of(options)),
        "device": found["device"],
        "mpi": found["mpi"].split(",")[0].strip(),
        "options": vars(options),
        "strip_bytes": options.channels * options.side * 4,
        "bytes": found["bytes"],
        "way": found["way"],
        "seconds": seconds,
        "median": median,
        "best": best,
        "ratio": ratios,
    }


def table(result: dict[str, Any]) -> str:
    """Table of microseconds of an exchange, and ratios to the best hand-written variant."""
    rows, cols = result["options"]["grid"]
    took = f"; we took: {result['way']}" if result["device"] == CPU else ""
    cells = []
    for name, times in result["seconds"].items():
        low, middle, high = (1e6 * value for value in statistics.quantiles(times, n=4))
        ratio = f"{result['ratio'][name]:.2f}"
        cells.append([name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", ratio])
    lines = [
        *heading(result),
        f"{rows}x{cols} ranks, float32, strips of {result['strip_bytes'] / 1024:.3g} KB, "
        f"{result['bytes'] / 1024:.3g} KB a rank{took}",
        "",
        *markdown(["", "median, us", "quartiles, us", "ratio"], cells),
        "",
        f"ratio: to the best by hand ({result['best']}), median over the rounds",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians, with the interquartile range as a line."""
    from matplotlib.figure import Figure

    names = list(result["seconds"])
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    panel = figure.subplots()
    for position, name in enumerate(names):
        low, middle, high = (
            1e6 * value for value in statistics.quantiles(result["seconds"][name], n=4)
        )
        color = "#1f5fa8" if name in OURS else "#c9c9c9" if name in BOUNDS else "#8a8a8a"
        panel.barh(position, middle, color=color, height=0.62)
        panel.plot([low, high], [position, position], color="black", linewidth=1)
        text = f" {middle:.0f} us, {result['ratio'][name]:.2f}"
        panel.text(max(middle, high), position, text, va="center", fontsize=8)
    limit = TARGET * 1e6 * result["median"][result["best"]]
    panel.axvline(limit, color="#b03030", linewidth=1, linestyle="--")
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.invert_yaxis()
    panel.margins(x=0.18)
    panel.set_xlim(left=0)
    panel.set_xlabel(
        f"time of an exchange, microseconds (median, quartiles), and ratio to the best "
        f"hand-written; dashed: {TARGET} times that",
        fontsize=8,
    )
    rows, cols = result["options"]["grid"]
    panel.set_title(
        f"halo exchange, {rows}x{cols} ranks on {place(result)}, strips of "
        f"{result['strip_bytes'] / 1024:.3g} KB, {result['mpi']}",
        fontsize=10,
    )
    save(figure, path)
