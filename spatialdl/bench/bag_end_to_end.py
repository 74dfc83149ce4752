"""Accuracy of a frozen encoder against end-to-end training, on rare tiles.

Trains `experiment=bag_end_to_end` with several seeds for slides and weights: once with a frozen,
randomly initialised encoder, and once end to end, with all other settings equal. Finished runs in
the folder are reused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spatialdl.bench.results import (
    CPU,
    heading,
    kept,
    markdown,
    origin,
    parser_of,
    place,
    publish,
    words_of,
)
from spatialdl.data.rare_tiles import KINDS, draw_tile
from spatialdl.planning import worker

ARMS = {"frozen": ("trainer.freeze=[encoder.*]",), "end_to_end": ()}
"""Overrides of the experiment, by arm."""

TITLES = {"frozen": "frozen encoder", "end_to_end": "end to end"}
COLORS = {"frozen": "#d0862a", "end_to_end": "#1f5fa8"}
_ROWS = ("no mark", *KINDS)
_SHOWN = 4  # tiles of each row in the picture


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    turns = list(product(range(options.seeds), ARMS))
    rows = []
    with tqdm(turns, desc="training", unit="run") as bar:
        for seed, arm in bar:
            bar.set_postfix_str(f"{TITLES[arm]}, seed {seed}")
            rows.append({"arm": arm, "seed": seed, **_run(options, arm, seed)})
    result = {
        **origin("bag_end_to_end", words_of(options)),
        "device": CPU,
        "options": vars(options),
        "rows": rows,
    }
    publish(result, table, draw, Path(options.out) / "bag-end-to-end")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("bag_end_to_end", __doc__)
    shown = "(%(default)s)"
    parser.add_argument("--seeds", type=int, default=3, help=f"runs per arm {shown}")
    parser.add_argument("--epochs", type=int, default=14, help=f"epochs per run {shown}")
    parser.add_argument("--slides", type=int, default=400, help=f"training slides {shown}")
    parser.add_argument("--validation", type=int, default=200, help=f"validation slides {shown}")
    parser.add_argument("--tiles", type=int, default=16, help=f"tiles per slide {shown}")
    parser.add_argument(
        "--folder",
        default="outputs/bench/bag_end_to_end",
        help=f"folder of finished runs {shown}",
    )
    options = parser.parse_args(arguments)
    counts = (options.seeds, options.epochs, options.slides, options.validation)
    if min(counts) < 1 or options.tiles < 2:
        raise ValueError("seeds, epochs, slides and validation must be at least 1, tiles 2")
    return options


def _run(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Accuracy on the validation slides by epoch, and seconds of the run."""
    settings = [
        *ARMS[arm],
        f"seed={seed}",
        f"trainer.max_epochs={options.epochs}",
        f"data.slides={options.slides}",
        f"data.validation_slides={options.validation}",
        f"data.tiles_a_slide={options.tiles}",
    ]
    name = f"{arm}-seed{seed}"
    folder = Path(options.folder)
    return kept(folder / f"{name}.json", settings, lambda: _trained(folder / name, settings))


def _trained(run_dir: Path, settings: Sequence[str]) -> dict[str, Any]:
    shutil.rmtree(run_dir, ignore_errors=True)  # remains of an interrupted run
    command = [
        *(sys.executable, "-m", "spatialdl.train", "experiment=bag_end_to_end", *settings),
        *("trainer.checkpoint.keep=0", "trainer.report=false", f"hydra.run.dir={run_dir}"),
    ]
    started = time.monotonic()
    worker.run(command, worker.environment(1))
    seconds = time.monotonic() - started
    summary_file = run_dir / "summary.json"
    if not summary_file.exists():
        raise RuntimeError(f"the run in {run_dir} was interrupted: run the same command again")
    summary = json.loads(summary_file.read_text())
    curve = [row["accuracy"] for row in summary["validation"]]
    return {"curve": curve, "loss": summary["loss"][-1], "seconds": seconds}


def table(result: dict[str, Any]) -> str:
    """Table with a line per arm and a column per seed."""
    options = result["options"]
    titles = ["", *(f"seed {seed}" for seed in range(options["seeds"])), "mean", "s a run"]
    rows = []
    for arm, title in TITLES.items():
        own = [row for row in result["rows"] if row["arm"] == arm]
        last = [row["curve"][-1] for row in own]
        seconds = statistics.median(row["seconds"] for row in own)
        cells = [_percent(value) for value in (*last, statistics.mean(last))]
        rows.append([title, *cells, f"{seconds:.0f}"])
    about = (
        f"accuracy on {options['validation']} validation slides after {options['epochs']} epochs "
        f"of {options['slides']}, two of {options['tiles']} tiles show the class; chance: 50%"
    )
    return "\n".join([*heading(result), about, "", *markdown(titles, rows)])


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw tiles without a mark and of both classes, and accuracy over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.2), dpi=150, layout="constrained")
    sides: Any = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    left, right = sides
    _show_tiles(left)
    _draw_accuracy(right, result)
    figure.savefig(path)


def _show_tiles(figure: Any) -> None:
    rng = np.random.default_rng(0)
    panels = figure.subplots(len(_ROWS), _SHOWN)
    for row, name in zip(panels, _ROWS, strict=True):
        for panel in row:
            panel.imshow(draw_tile(rng, 32, name if name in KINDS else None))
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        row[0].set_ylabel(name, fontsize=9)


def _draw_accuracy(figure: Any, result: dict[str, Any]) -> None:
    """Plot a thin line per seed, and their mean."""
    panel = figure.subplots()
    for arm, title in TITLES.items():
        curves = [row["curve"] for row in result["rows"] if row["arm"] == arm]
        by_epoch = [[100 * one for one in values] for values in zip(*curves, strict=True)]
        epochs = range(1, len(by_epoch) + 1)
        for seed in range(len(curves)):
            line = [values[seed] for values in by_epoch]
            panel.plot(epochs, line, color=COLORS[arm], linewidth=0.8, alpha=0.5)
        means = [statistics.mean(values) for values in by_epoch]
        panel.plot(epochs, means, "-o", color=COLORS[arm], markersize=3, label=title)
    panel.axhline(50, color="#8a8a8a", linewidth=1, linestyle="dotted")
    panel.set_ylim(0, 104)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("epoch")
    panel.set_ylabel("slide accuracy, %")
    panel.legend(frameon=False, loc="lower right", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    seeds = result["options"]["seeds"]
    panel.set_title(f"{seeds} seeds and their mean, {place(result)}", fontsize=9)
