"""Largest square image that trains within a memory limit per rank, on 1, 2, 4 ranks.

Each size is a run of two training steps, which is aborted above the limit. The peak at one fixed
size is also reported, including that of PyTorch without the memory settings of
`spatialdl.comm.allocator`. Memory is the peak resident set minus that of the imports, or on an
accelerator the peak memory of tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.device import add_device, describe
from spatialdl.bench.results import heading, markdown, origin, parser_of, place, publish, save
from spatialdl.bench.worker import OVER_LIMIT
from spatialdl.comm.device_path import device_of
from spatialdl.comm.launch import mpiexec_command
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.planning.worker import environment

STEP = 64
"""Sides are multiples of this."""

KILLED = (137, -9)
Measure = Callable[[int], float | None]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    result: dict[str, Any] = {
        **origin("memory", arguments),
        "device": describe(device_of(options.device)),
        "options": vars(options),
        "rows": [],
    }
    sides = [(ranks, again) for again in (False, True) for ranks in options.ranks]
    with tqdm(total=1 + len(sides), desc="sides", unit="side") as bar:
        bar.set_postfix_str(f"plain PyTorch: {options.size}x{options.size}")
        result["plain_mb_at_size"] = _run(options, 1, False, options.size, None, plain=True)
        bar.update()
        for ranks, again in sides:
            result["rows"].append(_measure_side(options, ranks, again, bar))
            bar.update()
    name = f"memory-{options.model}-{options.limit:.0f}mb"
    publish(result, table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("memory", __doc__)
    parser.add_argument(
        "--model", default="resnet18", help="function of spatialdl.models (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=1500, help="MB per rank (%(default)s)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="images per step (%(default)s)")
    parser.add_argument("--size", type=int, default=2048, help="fixed size (%(default)s)")
    parser.add_argument("--largest", type=int, default=16384, help="largest size (%(default)s)")
    add_device(parser)
    parser.add_argument("--threads", type=int, default=2, help="total threads (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.limit, options.batch, options.threads, *options.ranks) <= 0:
        raise ValueError("limit, ranks, batch and threads must be more than 0")
    if options.size < 1 or options.largest < STEP:
        raise ValueError(f"size must be at least 1, largest at least {STEP}")
    return options


def _measure_side(
    options: argparse.Namespace, ranks: int, again: bool, bar: tqdm[None]
) -> dict[str, Any]:
    runs: dict[int, float | None] = {}
    what = f"{ranks} rank{'s' * (ranks > 1)}{', recompute' * again}"

    def measure(side: int) -> float | None:
        bar.set_postfix_str(f"{what}: {side}x{side}")
        runs[side] = _run(options, ranks, again, side, options.limit)
        return runs[side]

    largest = search(measure, options.limit, options.largest)
    bar.set_postfix_str(f"{what}: {options.size}x{options.size}")
    at_size = runs.get(options.size) or _run(options, ranks, again, options.size, None)
    return {
        "ranks": ranks,
        "grid": nearly_cubic(ranks),
        "recompute": again,
        "largest": largest,
        "memory_mb": runs.get(largest),
        "memory_mb_at_size": at_size,
        "runs": {str(side): found for side, found in sorted(runs.items())},
    }


def search(
    measure: Measure, limit: float, most: int, fits: int = 0, too_large: int | None = None
) -> int:
    """Largest multiple of `STEP` up to `most` for which `measure` returns a number; 0 if none.

    Bisection between the largest side that trained and the smallest that did not. As memory grows
    with the area, the side extrapolated from the last run is tried first.

    Args:
        fits, too_large: sides known to train and not to train, multiples of `STEP`.
    """
    if too_large is None:
        too_large = most // STEP * STEP + STEP
    following = (fits + too_large) // 2 // STEP * STEP if fits else 8 * STEP
    while too_large - fits > STEP:
        side = min(max(following, fits + STEP), too_large - STEP)
        memory = measure(side)
        if memory is None:
            too_large = side
            following = fits + (side - fits) * 3 // 4 // STEP * STEP
        else:
            fits = side
            following = min(int(side * sqrt(limit / max(memory, 1.0))), 4 * side) // STEP * STEP
    return fits


def _run(
    options: argparse.Namespace,
    ranks: int,
    again: bool,
    side: int,
    limit: float | None,
    plain: bool = False,
) -> float | None:
    """Peak MB of the largest rank; None above the limit or the available memory."""
    rows, cols = nearly_cubic(ranks)
    command = [
        *([] if ranks == 1 else mpiexec_command(ranks)),
        *(sys.executable, "-m", "spatialdl.bench.worker", "--model", options.model),
        *("--size", str(side), "--batch", str(options.batch), "--steps", "1"),
        *("--device", options.device),
        *(() if ranks == 1 else ("--grid", str(rows), str(cols))),
        *(("--recompute",) if again else ()),
        *(() if limit is None else ("--limit", str(limit))),
    ]
    variables = environment(max(1, options.threads // ranks), plain)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if "over limit" in done.stdout or done.returncode in (OVER_LIMIT, *KILLED):
        return None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found = float(json.loads(done.stdout.strip().splitlines()[-1])["memory_mb"])
    return found if limit is None or found <= limit else None


def table(result: dict[str, Any]) -> str:
    """Table with a line per variant."""
    options, rows = result["options"], result["rows"]
    first = rows[0]
    one = first["memory_mb_at_size"]
    cells = [["plain PyTorch", "", "", *_peak(result["plain_mb_at_size"], one)]]
    for row in rows:
        title = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}{', recompute' * row['recompute']}"
        pixels = (row["largest"] / first["largest"]) ** 2 if first["largest"] else 0.0
        image = f"{row['largest']}x{row['largest']}"
        cells.append([title, image, f"{pixels:.2f}", *_peak(row["memory_mb_at_size"], one)])
    peak = f"peak at {options['size']}, MB a rank"
    lines = [
        *heading(result),
        f"{options['model']}, batch {options['batch']}, {options['limit']:.0f} MB a rank",
        "",
        *markdown(["", "largest image", "times the pixels", peak, "of one process"], cells),
    ]
    return "\n".join(lines)


def _peak(memory: float | None, one: float | None) -> tuple[str, str]:
    """MB, and the ratio to one process."""
    found = "killed" if memory is None else f"{memory:.0f}"
    return found, f"{memory / one:.2f}" if memory and one else ""


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the side of the largest image, and of the peak at one size."""
    from matplotlib.figure import Figure

    options, rows = result["options"], result["rows"]
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    title = f"{options['model']}, batch {options['batch']}, training, {place(result)}"
    figure.suptitle(title, fontsize=11)
    limit, size = options["limit"], options["size"]
    titles = (
        ("largest", f"largest square image within {limit:.0f} MB per rank,\nside in pixels"),
        ("memory_mb_at_size", f"peak of a rank at {size}x{size}, MB;\nratio to one process"),
    )
    ranks = options["ranks"]
    for panel, (key, title) in zip(panels, titles, strict=True):
        for offset, again, colour in ((-0.2, False, "#1f5fa8"), (0.2, True, "#d1701f")):
            heights = [row[key] or 0 for row in rows if row["recompute"] == again]
            label = "blocks recomputed" if again else "activations kept"
            places = [place + offset for place in range(len(ranks))]
            bars = panel.bar(places, heights, width=0.38, color=colour, label=label)
            one = 1 if key == "largest" else rows[0][key] or 1
            form = "%.0f" if key == "largest" else "%.2f"
            panel.bar_label(bars, [form % (value / one) for value in heights], fontsize=8)
        panel.set_xticks(range(len(ranks)), [f"{n} rank{'s' * (n > 1)}" for n in ranks])
        panel.set_title(title, fontsize=9)
        panel.margins(y=0.12)
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    save(figure, path)
