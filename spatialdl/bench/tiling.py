"""Tiles per CPU second of one slide: openslide, native tiles, and the command end to end.

All alternate, in separate processes. The command finds the tissue of the slide, reads all its tiles
and writes a data set with checksums, pictures and a report; it reads natively, through openslide
only, or passes the JPEG tiles of the slide through. A batch of several slides is timed with one and
more processes, in wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from tqdm import tqdm

from spatialdl.bench.results import median_ratio, origin, parser_of, publish, save, words_of
from spatialdl.planning.worker import environment, run_worker
from spatialdl.slides.reading.decoding import DETECTS_DAMAGE

OPENSLIDE, NATIVE = "openslide alone", "native alone"
OURS, THROUGH = "end to end", "end to end, through openslide"
PASSED = "end to end, passed through"
HASHED = "SHA-256 alone"
WAYS = (OPENSLIDE, NATIVE, OURS, THROUGH, PASSED, HASHED)
COLORS = {
    **{OPENSLIDE: "#8a8a8a", NATIVE: "#d0862a", OURS: "#1f5fa8", THROUGH: "#8fb3dc"},
    **{PASSED: "#2a8f6a", HASHED: "#c9c9c9"},
}
HS2P = 270.0
"""Tiles of 256 pixels per CPU second, read and written by hs2p."""
TARGETS = {OURS: 3 * HS2P, PASSED: 5 * HS2P}
OF_OPENSLIDE = 0.85
WIDE = 32  # columns of names in the table
BATCH = 4  # slides of a timed batch
OF_ONE = 1.8
"""Target: speed-up of two processes over one."""
DECODER = "simplejpeg" if DETECTS_DAMAGE else "imagecodecs, each checked by openslide"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(options.slide or Path(folder) / f"{options.side}.tiff")
        if not slide.exists():
            draw_slide(slide, options.side)
        turns = _turns(options)
        bar = tqdm(turns, "runs", unit="run")
        found = [_run(turn, options, slide, Path(folder)) for turn in bar]
    result = summarise(options, list(zip(turns, found, strict=True)))
    publish(result, table, draw, Path(options.out) / f"tiling-{options.side}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("tiling", __doc__)
    add = parser.add_argument
    add("--side", type=int, default=20_000, help="side of the slide (%(default)s)")
    add("--tiles", type=int, nargs="+", default=[256, 1024], help="sides of tiles (%(default)s)")
    add("--rounds", type=int, default=3, help="rounds (%(default)s)")
    add("--most", type=int, default=2000, help="tiles per round without writing (%(default)s)")
    add("--jobs", type=int, nargs="+", default=[2], help="processes, besides one (%(default)s)")
    add("--slide", help="file to keep the slide in for later runs (not kept)")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.most, *options.tiles, *options.jobs) < 1:
        raise ValueError("rounds, most, jobs and tiles must be at least 1")
    if options.side < max(options.tiles):
        raise ValueError(f"side {options.side} is smaller than a tile of {max(options.tiles)}")
    return options


def draw_slide(path: Path, side: int) -> None:
    """Write a synthetic slide, with a progress bar."""
    from spatialdl.slides.synthetic import drawing

    with tqdm(total=side, desc="drawing the slide", unit="row") as bar:
        drawing.write_synthetic_slide(path, "ring", (side, side), progress=bar.update)


class TilingRun(NamedTuple):
    """A run: round, side of the tiles, way, processes, slides."""

    number: int
    side: int
    way: str
    jobs: int
    slides: int


def _turns(options: argparse.Namespace) -> list[TilingRun]:
    turns = []
    for number in range(options.rounds):
        for side in options.tiles:
            turns += [TilingRun(number, side, way, 1, 1) for way in WAYS]
        clocked = options.tiles[0]
        turns += [TilingRun(number, clocked, OURS, jobs, BATCH) for jobs in _jobs(options)]
    return turns


def _jobs(options: argparse.Namespace) -> list[int]:
    """Distinct numbers of processes of a batch, including one."""
    return list(dict.fromkeys([1, *options.jobs]))


def _run(
    turn: TilingRun, options: argparse.Namespace, slide: Path, folder: Path
) -> dict[str, float]:
    """CPU seconds, wall seconds, and tiles of a run."""
    command = [
        *(sys.executable, "-m", "spatialdl.bench.tiling_worker", turn.way, str(slide)),
        *("--tile-size", str(turn.side), "--most", str(options.most), "--jobs", str(turn.jobs)),
        *("--slides", str(turn.slides), "--out", str(folder / "set")),
    ]
    return dict(run_worker(command, environment(1)))


def summarise(
    options: argparse.Namespace, found: Sequence[tuple[TilingRun, dict[str, float]]]
) -> dict[str, Any]:
    """Medians over the rounds, and of ratios per round."""
    rows = []
    for side in options.tiles:
        cpu = {
            way: [k["tiles"] / k["cpu_seconds"] for t, k in found if t[1:] == (side, way, 1, 1)]
            for way in WAYS
        }
        rows.append(
            {
                "side": side,
                "rates": {way: statistics.median(cpu[way]) for way in WAYS},
                "to_openslide": {way: median_ratio(cpu[way], cpu[OPENSLIDE]) for way in WAYS},
            }
        )
    clock = {
        jobs: [k["tiles"] / k["seconds"] for t, k in found if (t.jobs, t.slides) == (jobs, BATCH)]
        for jobs in _jobs(options)
    }
    return {
        **origin("tiling", words_of(options)),
        "options": vars(options),
        "decoder": DECODER,
        "rows": rows,
        "clock": {
            str(jobs): {"rate": statistics.median(each), "to_one": median_ratio(each, clock[1])}
            for jobs, each in clock.items()
        },
        "found": [{**turn._asdict(), **each} for turn, each in found],
    }


def table(result: dict[str, Any]) -> str:
    """Table of tiles per CPU second, and ratios to openslide alone."""
    side = result["options"]["side"]
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}",
        "",
        f"slide of {side} x {side} pixels in JPEG tiles; tiles per CPU second, medians",
        f"native tiles by {result['decoder']}",
        "",
        f"{'':{WIDE}}" + "".join(f"{row['side']:>10}{'ratio':>8}" for row in result["rows"]),
    ]
    for way in WAYS:
        cells = (
            f"{row['rates'][way]:10.0f}{row['to_openslide'][way]:8.2f}" for row in result["rows"]
        )
        lines.append(f"{way:{WIDE}}" + "".join(cells))
    clocked = result["options"]["tiles"][0]
    lines += ["", f"{BATCH} such slides, tiles of {clocked} per second of wall time, end to end"]
    for jobs, found in result["clock"].items():
        name = f"{jobs} process{'es' if int(jobs) > 1 else ''}"
        lines.append(f"{name:{WIDE}}{found['rate']:10.0f}{found['to_one']:8.2f}")
    lines += [
        "",
        f"ratio: to {OPENSLIDE} (below: to one process), median of the rounds",
        f"targets, tiles of 256: {TARGETS[OURS]:.0f} end to end and {TARGETS[PASSED]:.0f} passed "
        f"through (3 and 5 times hs2p), {OF_OPENSLIDE} through openslide, {OF_ONE} by 2 processes",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of tiles per CPU second."""
    from matplotlib.figure import Figure

    rows, side = result["rows"], result["options"]["side"]
    figure = Figure(figsize=(6.4 * len(rows), 4), dpi=150, layout="constrained")
    figure.suptitle(f"slide of {side} x {side} pixels in JPEG tiles, level 0", fontsize=11)
    for panel, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        rates = [row["rates"][way] for way in WAYS]
        names = [fill(way, 11) for way in WAYS]
        bars = panel.bar(names, rates, color=[COLORS[way] for way in WAYS], width=0.6)
        shown = [f"{row['rates'][way]:.0f}\n{row['to_openslide'][way]:.2f} x" for way in WAYS]
        panel.bar_label(bars, shown, fontsize=8)
        panel.set_ylabel(f"tiles of {row['side']} pixels per CPU second", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
        panel.margins(y=0.16)
    save(figure, path)
