"""MB per CPU second of boxes of one large image, from a raw shard and from what else there is.

Windows of 1024 pixels lie anywhere; quarters are what each of 2 x 2 ranks reads of such an image
of 1024 pixels. All ways take the same boxes in turns, in one process, from the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spatialdl.bench.io_ways import (
    DECODED,
    MEMMAP,
    OURS,
    PLAIN,
    PNG,
    PREAD,
    THROUGH,
    WAYS,
    Read,
    draw_image,
    open_all,
    write_all,
)
from spatialdl.bench.results import machine, publish

WINDOW = 1024
QUARTER = WINDOW // 2
KINDS = {f"windows of {WINDOW}": WINDOW, f"quarters of {QUARTER}": QUARTER}
OF_MEMMAP, OF_PLAIN = 0.6, 3.0
"""What reading a raw shard is to reach of the others' rates."""
FEWER = 20  # boxes to one that is decoded from files
WIDE = 28  # columns of names in the table
COLORS = {MEMMAP: "#8a8a8a", OURS: "#1f5fa8", PREAD: "#5d8fca", THROUGH: "#8fb3dc"}
OTHERS = "#d0862a"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_all(draw_image(options.side), folder)
        reads = open_all(folder, options.side)
        _check_same(reads)
        found = measure(reads, options)
    publish(summarise(options, found), table, draw, Path(options.out) / f"io-{options.side}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.bench io", description=__doc__)
    add = parser.add_argument
    add("--side", type=int, default=8192, help="of the image in pixels (%(default)s)")
    add("--boxes", type=int, default=100, help="of each kind in a round (%(default)s)")
    add("--rounds", type=int, default=7, help="of each way (%(default)s)")
    add("--folder", help="where the files are kept meanwhile (the system's temporary folder)")
    add("--out", default="outputs/bench", help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.boxes, options.rounds) < 1:
        raise ValueError("boxes and rounds must be at least 1")
    if options.side < WINDOW:
        raise ValueError(f"side {options.side} is smaller than a window of {WINDOW}")
    return options


def _check_same(reads: dict[str, Read]) -> None:
    """All ways that lose nothing give the same pixels."""
    wanted = reads[MEMMAP](0, 0, WINDOW)
    for way in (OURS, PREAD, THROUGH, PLAIN, PNG):
        if not np.array_equal(reads[way](0, 0, WINDOW), wanted):
            raise RuntimeError(f"{way} gives other pixels than {MEMMAP}")


def measure(
    reads: dict[str, Read], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """MB per CPU second of every kind of box, way and round."""
    rng = np.random.default_rng(1)
    found: dict[str, dict[str, list[float]]] = {k: {way: [] for way in reads} for k in KINDS}
    with tqdm(total=options.rounds * len(KINDS) * len(reads), unit="run") as bar:
        for _ in range(options.rounds):
            for kind, side in KINDS.items():
                step = 1 if side == WINDOW else QUARTER
                most = (options.side - side) // step
                places = (rng.integers(0, most + 1, (options.boxes, 2)) * step).tolist()
                for way, read in reads.items():
                    few = -(-len(places) // FEWER) if way in DECODED else len(places)
                    found[kind][way].append(_rate(read, places[:few], side))
                    bar.update()
    return found


def _rate(read: Read, places: Sequence[Sequence[int]], side: int) -> float:
    before, count = time.process_time(), 0
    for row, col in places:
        count += read(row, col, side).nbytes
    return count / 1e6 / (time.process_time() - before)


def summarise(
    options: argparse.Namespace, found: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken round by round."""
    reading = [
        {
            "kind": kind,
            "rates": {way: statistics.median(rates[way]) for way in WAYS},
            "to_memmap": {way: _ratio(rates[way], rates[MEMMAP]) for way in WAYS},
            "to_plain": {way: _ratio(rates[way], rates[PLAIN]) for way in WAYS},
        }
        for kind, rates in found.items()
    ]
    return {
        "command": f"python -m spatialdl.bench io --side {options.side} --boxes {options.boxes} "
        f"--rounds {options.rounds}",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "options": vars(options),
        "reading": reading,
        "found": found,
    }


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def table(result: dict[str, Any]) -> str:
    """MB per CPU second, and their ratios to those of np.memmap and of plain h5py."""
    side, rows = result["options"]["side"], result["reading"]
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}",
        "",
        f"boxes of an image of {side} x {side} pixels, page cache warm; MB per CPU second, medians",
        "",
        f"{'':{WIDE}}" + "".join(f"{row['kind']:>16}{'memmap':>9}{'plain':>8}" for row in rows),
    ]
    for way in WAYS:
        cells = (
            f"{row['rates'][way]:16.0f}{row['to_memmap'][way]:9.2f}{row['to_plain'][way]:8.2f}"
            for row in rows
        )
        lines.append(f"{way:{WIDE}}" + "".join(cells))
    lines += [
        "",
        f"memmap, plain: ratio to {MEMMAP} and to {PLAIN}, median of the rounds",
        f"wanted of {OURS}: {OF_MEMMAP} of {MEMMAP}, {OF_PLAIN:.0f} times {PLAIN} in windows",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of MB per CPU second."""
    from matplotlib.figure import Figure

    rows, side = result["reading"], result["options"]["side"]
    figure = Figure(figsize=(6.4 * len(rows), 4), dpi=150, layout="constrained")
    figure.suptitle(f"boxes of an image of {side} x {side} pixels, page cache warm", fontsize=11)
    for panel, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        rates = [row["rates"][way] for way in WAYS]
        names = [way.replace(", ", ",\n").replace(" of ", "\nof ") for way in WAYS]
        bars = panel.bar(names, rates, color=[COLORS.get(way, OTHERS) for way in WAYS], width=0.6)
        shown = [f"{row['rates'][way]:.0f}\n{row['to_memmap'][way]:.2f} x" for way in WAYS]
        panel.bar_label(bars, shown, fontsize=8)
        panel.set_ylabel(f"MB per CPU second, {row['kind']}", fontsize=9)
        panel.tick_params(axis="x", labelsize=7)
        panel.margins(y=0.16)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
