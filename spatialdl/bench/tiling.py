"""Tiles per CPU second of one slide: openslide alone, its own tiles alone, the command end to end.

All are taken in turns, in processes of their own. The command finds the tissue of the slide, reads
all its tiles and writes a data set with checksums; it runs twice, reading natively and through
openslide alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.results import machine, publish
from spatialdl.slides.reading.decoding import TELLS_OF_DAMAGE
from spatialdl.worker import environment, run_worker

OPENSLIDE, NATIVE = "openslide alone", "native alone"
OURS, THROUGH = "end to end", "end to end, through openslide"
WAYS = (OPENSLIDE, NATIVE, OURS, THROUGH)
COLORS = {OPENSLIDE: "#8a8a8a", NATIVE: "#d0862a", OURS: "#1f5fa8", THROUGH: "#8fb3dc"}
TARGET = 810.0
"""Tiles of 256 pixels per CPU second, three times as many as hs2p."""
OF_OPENSLIDE = 0.85
DECODER = "simplejpeg" if TELLS_OF_DAMAGE else "imagecodecs, openslide asked about each"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(options.slide or Path(folder) / f"{options.side}.tiff")
        if not slide.exists():
            draw_slide(slide, options.side)
        seconds = _measure(options, slide, Path(folder))
    result = summarise(options, seconds)
    publish(result, table, draw, Path(options.out) / f"tiling-{options.side}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.bench tiling", description=__doc__)
    add = parser.add_argument
    add("--side", type=int, default=20_000, help="of the slide in pixels (%(default)s)")
    add("--tiles", type=int, nargs="+", default=[256, 1024], help="sides (%(default)s)")
    add("--rounds", type=int, default=3, help="of each (%(default)s)")
    add("--most", type=int, default=2000, help="tiles read alone in a round (%(default)s)")
    add("--slide", help="where to keep the slide for another time (nowhere)")
    add("--out", default="outputs/bench", help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.most, *options.tiles) < 1:
        raise ValueError("rounds, most and tiles must be at least 1")
    if options.side < max(options.tiles):
        raise ValueError(f"side {options.side} is smaller than a tile of {max(options.tiles)}")
    return options


def draw_slide(path: Path, side: int) -> None:
    """Write a synthetic slide, with a bar."""
    from spatialdl.slides.synthetic import drawing

    with tqdm(total=side, desc="drawing the slide", unit="row") as bar:
        drawing.write_synthetic_slide(path, "ring", (side, side), progress=bar.update)


def _measure(
    options: argparse.Namespace, slide: Path, folder: Path
) -> dict[int, dict[str, list[float]]]:
    """Seconds of CPU a tile: by side of the tiles and way, a number a round."""
    seconds: dict[int, dict[str, list[float]]] = {
        side: {way: [] for way in WAYS} for side in options.tiles
    }
    turns = [(k, side, way) for k in range(options.rounds) for side in seconds for way in WAYS]
    for _, side, way in tqdm(turns, desc="rounds", unit="run"):
        command = [
            *(sys.executable, "-m", "spatialdl.bench.tiling_worker", way, str(slide)),
            *("--tile-size", str(side), "--most", str(options.most), "--out", str(folder / "set")),
        ]
        found = run_worker(command, environment(1))
        seconds[side][way].append(found["cpu_seconds"] / found["tiles"])
    return seconds


def summarise(
    options: argparse.Namespace, seconds: dict[int, dict[str, list[float]]]
) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken round by round."""
    rows = []
    for side, found in seconds.items():
        rates = {way: statistics.median(1 / each for each in found[way]) for way in WAYS}
        to_openslide = {
            way: statistics.median(a / b for a, b in zip(found[OPENSLIDE], found[way], strict=True))
            for way in WAYS
        }
        rows.append({"side": side, "rates": rates, "to_openslide": to_openslide})
    return {
        "command": f"python -m spatialdl.bench tiling --side {options.side} --tiles "
        f"{' '.join(map(str, options.tiles))} --rounds {options.rounds} --most {options.most}",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "options": vars(options),
        "decoder": DECODER,
        "rows": rows,
        "seconds": seconds,
    }


def table(result: dict[str, Any]) -> str:
    """Tiles per CPU second, and how many times those of openslide alone."""
    side = result["options"]["side"]
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}",
        "",
        f"slide of {side} x {side} pixels in JPEG tiles; tiles per CPU second, medians",
        f"native tiles by {result['decoder']}",
        "",
        f"{'':32}" + "".join(f"{row['side']:>10}{'ratio':>8}" for row in result["rows"]),
    ]
    for way in WAYS:
        cells = (
            f"{row['rates'][way]:10.0f}{row['to_openslide'][way]:8.2f}" for row in result["rows"]
        )
        lines.append(f"{way:32}" + "".join(cells))
    lines.append(
        f"\nratio: to {OPENSLIDE}, median of the rounds; wanted: {TARGET:.0f} tiles of 256 end to "
        f"end, {OF_OPENSLIDE} through openslide"
    )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of tiles per CPU second."""
    from matplotlib.figure import Figure

    rows, side = result["rows"], result["options"]["side"]
    figure = Figure(figsize=(4.6 * len(rows), 4), dpi=150, layout="constrained")
    figure.suptitle(f"slide of {side} x {side} pixels in JPEG tiles, level 0", fontsize=11)
    for panel, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        rates = [row["rates"][way] for way in WAYS]
        names = [way.replace(", ", ",\n").replace(" alone", "\nalone") for way in WAYS]
        bars = panel.bar(names, rates, color=[COLORS[way] for way in WAYS], width=0.6)
        shown = [f"{row['rates'][way]:.0f}\n{row['to_openslide'][way]:.2f} x" for way in WAYS]
        panel.bar_label(bars, shown, fontsize=8)
        panel.set_ylabel(f"tiles of {row['side']} pixels per CPU second", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
        panel.margins(y=0.16)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
