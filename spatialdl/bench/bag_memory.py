"""Memory of a training step over the number of tiles of a slide: whole graph, and slices.

An encoder (a ResNet-18 with frozen BatchNorm) and gated attention train two steps on one slide, in
a separate process for each number. Memory is the peak resident set of the largest rank, minus that
of the imports. Finished runs in the folder are reused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bags.end_to_end import MODES
from spatialdl.bench.results import (
    CPU,
    heading,
    kept,
    markdown,
    origin,
    parser_of,
    place,
    publish,
    save,
    words_of,
)
from spatialdl.comm.launch import mpiexec_command
from spatialdl.planning.worker import environment, run_worker

COLORS = {"graph": "#d1701f", "slices": "#1f5fa8"}
STYLES = ("-", "--", ":", "-.")


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    sides = list(product(options.tiles, options.ranks, MODES))
    rows = []
    with tqdm(sides, desc="sides", unit="side") as bar:
        for tiles, ranks, mode in bar:
            bar.set_postfix_str(f"{tiles} tiles, {ranks} ranks, {mode}")
            found = _run(options, tiles, ranks, mode)
            rows.append({"tiles": tiles, "ranks": ranks, "mode": mode, **found})
    result = {
        **origin("bag_memory", words_of(options)),
        "device": CPU,
        "options": vars(options),
        "rows": rows,
    }
    publish(result, table, draw, Path(options.out) / "bag_memory")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("bag_memory", __doc__)
    shown = "(%(default)s)"
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[16, 32, 64, 128], help=f"tiles per slide {shown}"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help=f"ranks {shown}")
    parser.add_argument("--side", type=int, default=64, help=f"side of a tile in pixels {shown}")
    parser.add_argument("--slice", type=int, default=16, help=f"tiles per slice {shown}")
    parser.add_argument("--width", type=int, default=256, help=f"features per tile {shown}")
    parser.add_argument(
        "--folder", default="outputs/bench/bag_memory", help=f"folder of finished runs {shown}"
    )
    options = parser.parse_args(arguments)
    if min(options.side, options.slice, options.width, *options.tiles, *options.ranks) < 1:
        raise ValueError("tiles, ranks, side, slice and width must be at least 1")
    if len(options.ranks) > len(STYLES):
        raise ValueError(f"--ranks: at most {len(STYLES)} values, as in one picture")
    return options


def _run(options: argparse.Namespace, tiles: int, ranks: int, mode: str) -> dict[str, Any]:
    words = [
        *("--mode", mode, "--tiles", str(tiles), "--ranks", str(ranks)),
        *("--side", str(options.side), "--slice", str(options.slice)),
        *("--width", str(options.width)),
    ]
    command = [
        *([] if ranks == 1 else mpiexec_command(ranks)),
        *(sys.executable, "-m", "spatialdl.bench.bag_memory_worker", *words),
    ]
    path = Path(options.folder) / f"{mode}-{tiles}tiles-{ranks}ranks.json"
    return kept(path, words, lambda: run_worker(command, environment(threads=1)))


def table(result: dict[str, Any]) -> str:
    """Table with a line per number of tiles, and a column per mode and number of ranks."""
    options = result["options"]
    sides = list(product(MODES[::-1], options["ranks"]))
    titles = ["tiles", *(f"{mode}, {_ranks(ranks)}" for mode, ranks in sides)]
    of = {(row["tiles"], row["mode"], row["ranks"]): row for row in result["rows"]}
    rows = [
        [str(tiles), *(_cell(of[tiles, mode, ranks]) for mode, ranks in sides)]
        for tiles in options["tiles"]
    ]
    about = (
        f"tiles of {options['side']}x{options['side']}, slices of {options['slice']}; peak MB of "
        "a rank, and seconds of a step"
    )
    return "\n".join([*heading(result), about, "", *markdown(titles, rows)])


def _cell(row: dict[str, Any]) -> str:
    return f"{row['memory_mb']:.0f} MB, {row['seconds']:.1f} s"


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot memory of a rank over the number of tiles, by mode and number of ranks."""
    from matplotlib.figure import Figure

    options = result["options"]
    figure = Figure(figsize=(6.5, 4), dpi=150, layout="constrained")
    panel = figure.subplots()
    for mode, (ranks, style) in product(MODES[::-1], zip(options["ranks"], STYLES, strict=False)):
        rows = [row for row in result["rows"] if (row["mode"], row["ranks"]) == (mode, ranks)]
        panel.plot(
            [row["tiles"] for row in rows],
            [row["memory_mb"] for row in rows],
            style,
            marker="o",
            markersize=4,
            color=COLORS[mode],
            label=f"{'whole graph' if mode == 'graph' else 'slices'}, {_ranks(ranks)}",
        )
    panel.set_xlabel("tiles of the slide")
    panel.set_ylabel("peak memory of a rank, MB")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=9)
    panel.set_title(
        f"ResNet-18 on tiles of {options['side']}x{options['side']} and gated attention, trained "
        f"together,\n{place(result)}",
        fontsize=9,
    )
    save(figure, path)
