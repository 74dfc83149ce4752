"""Whole images on several ranks against tiles with votes, where the class is an arrangement.

Draws slides of 2048 pixels on which crescents some 1,000 pixels apart face each other or look
away, cuts them whole and into tiles of 256 pixels, and trains one network on both: with the same
number of steps, and of pixels in a step. Tiles have the class of their slide, and a slide that of
its tiles' mean probability.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl import worker
from spatialdl.bench.results import machine, publish
from spatialdl.slides.synthetic.drawing import ARRANGEMENTS, write_synthetic_slide

SIDE, TILE, MPP = 2048, 256, 0.5
WHOLE, TILES = "whole images", "tiles, votes"
WAYS = (WHOLE, TILES)
FOLDERS = {WHOLE: "whole", TILES: "tiles"}
BATCH = 8  # slides in a step
SETTINGS = (
    *("model=wide_view", "data=shards", "data.augment.flip=0.5", "optimizer=adamw"),
    *("optimizer.lr=5e-3", "optimizer.weight_decay=0.01", "scheduler=one_cycle"),
)
WANTED, CHANCE = 0.9, 0.5
COLORS = {WHOLE: "#1f5fa8", TILES: "#d0862a"}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        draw_slides(folder, options)
        for way in WAYS:
            cut(folder, way)
        turns = [(way, seed) for seed in range(options.seeds) for way in WAYS]
        runs = [
            {"way": way, "seed": seed, **train(folder, way, seed, options)}
            for way, seed in tqdm(turns, "training", unit="run")
        ]
        result = summarise(options, runs, time.monotonic() - started)
        publish(result, table, draw, Path(options.out) / "whole-vs-tiles")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m spatialdl.bench whole_vs_tiles", description=__doc__
    )
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    add("--slides", type=int, default=256, help="to train on (%(default)s)")
    add("--validation", type=int, default=64, help="slides to validate on (%(default)s)")
    add("--epochs", type=int, default=12, help="of each run (%(default)s)")
    add("--folder", help="where slides and data sets are kept meanwhile: 10 GB")
    add("--out", default="outputs/bench", help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.epochs) < 1:
        raise ValueError("seeds and epochs must be at least 1")
    if min(options.slides, options.validation) < 2:
        raise ValueError("slides and validation must be at least 2, one of each class")
    return options


def draw_slides(folder: Path, options: argparse.Namespace) -> None:
    """Slides of both classes in turns, every one of another seed, and `labels.csv`."""
    slides = folder / "slides"
    slides.mkdir()
    rows = []
    for number in range(options.slides + options.validation):
        split = "train" if number < options.slides else "val"
        rows.append((f"{number:04d}.tif", ARRANGEMENTS[number % 2], split))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "split"), *rows])
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(write_synthetic_slide, slides / name, kind, (SIDE, SIDE), MPP, seed=number)
            for number, (name, kind, _) in enumerate(rows)
        ]
        for job in tqdm(jobs, "drawing slides", unit="slide"):
            job.result()


def cut(folder: Path, way: str) -> None:
    """Make the data set of a way with the command that users have."""
    how = ["--whole"] if way == WHOLE else ["--tile-size", str(TILE)]
    command = [
        *(sys.executable, "-m", "spatialdl.slides.command", str(folder / "slides"), *how),
        *(
            "--out",
            str(folder / FOLDERS[way]),
            "--mpp",
            str(MPP),
            "--labels",
            str(folder / "labels.csv"),
        ),
        *("--min-tissue", "0", "--jobs", "2"),
    ]
    worker.run(command, worker.environment(1))


def train(folder: Path, way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy on the slides, memory of the largest rank and seconds of one run."""
    data = folder / FOLDERS[way]
    run = folder / f"{data.name}-{seed}"
    tiles = (SIDE // TILE) ** 2
    layout = ["parallel=sp", f"data.batch_size={BATCH}"]
    if way == TILES:
        layout = ["parallel=dp", f"data.batch_size={BATCH * tiles}"]
    command = [
        *(sys.executable, "-m", "spatialdl.train", *SETTINGS, *layout),
        *(f"data.path={data}", f"seed={seed}", f"hydra.run.dir={run}"),
        *(f"trainer.max_epochs={options.epochs}", "trainer.checkpoint.keep=0"),
    ]
    started = time.monotonic()
    worker.run(command, worker.environment(1))
    summary = json.loads((run / "summary.json").read_text())
    last = summary["validation"][-1]
    return {
        "accuracy": last["slide_accuracy"],
        "samples": last["samples"],
        "steps": len(summary["loss"]),
        "memory_mb": max(summary["peak_memory_mb"]),
        "seconds": time.monotonic() - started,
        "curve": [row["slide_accuracy"] for row in summary["validation"]],
    }


def summarise(
    options: argparse.Namespace, runs: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What the runs of each way come to."""
    found = {}
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        accuracies = [run["accuracy"] for run in own]
        found[way] = {
            "accuracies": accuracies,
            "mean": statistics.mean(accuracies),
            "memory_mb": max(run["memory_mb"] for run in own),
            "seconds": statistics.median(run["seconds"] for run in own),
            "steps": own[0]["steps"],
        }
    return {
        "command": f"python -m spatialdl.bench whole_vs_tiles --seeds {options.seeds} "
        f"--slides {options.slides} --epochs {options.epochs}",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "options": vars(options),
        "found": found,
        "runs": list(runs),
        "seconds": seconds,
    }


def table(result: dict[str, Any]) -> str:
    """Accuracy of every seed, memory and time."""
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}, {result['seconds'] / 60:.0f} minutes",
        "",
        f"{'':16}{'accuracy on slides':>20}{'each seed':>{7 * result['options']['seeds'] + 4}}"
        f"{'MB a rank':>12}{'steps':>8}{'s a run':>10}",
    ]
    for way in WAYS:
        one = result["found"][way]
        each = "".join(f"{100 * value:6.0f}%" for value in one["accuracies"])
        lines.append(
            f"{way:16}{100 * one['mean']:19.1f}%    {each}{one['memory_mb']:12.0f}"
            f"{one['steps']:8}{one['seconds']:10.0f}"
        )
    lines += ["", f"wanted of {WHOLE}: {100 * WANTED:.0f}%; chance: {100 * CHANCE:.0f}%"]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """A slide of each class, and the accuracy on the validation slides over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.35))
    for panel, kind in zip(panels, ARRANGEMENTS, strict=False):
        _show(panel, kind)
    _draw_curves(panels[2], result)
    figure.savefig(path)


def _show(panel: Any, kind: str) -> None:
    """A slide, and how much of it a tile is."""
    import tifffile
    from matplotlib.patches import Rectangle

    with tempfile.TemporaryDirectory() as name:
        slide = Path(name) / "slide.tif"
        write_synthetic_slide(slide, kind, (SIDE, SIDE), MPP, seed=3)
        image = tifffile.imread(slide, key=0)
    panel.imshow(image[::3, ::3], extent=(0, SIDE, SIDE, 0))
    panel.add_patch(Rectangle((2 * TILE, 3 * TILE), TILE, TILE, fill=False, linewidth=1.5))
    panel.annotate("a tile", (2 * TILE, 3 * TILE), (0, 4), textcoords="offset points", fontsize=9)
    panel.set_title(f'of the class "{kind}"')
    panel.set_xticks([0, SIDE])
    panel.set_yticks([0, SIDE])


def _draw_curves(panel: Any, result: dict[str, Any]) -> None:
    for run in result["runs"]:
        accuracies = [100 * value for value in run["curve"]]
        label = run["way"] if run["seed"] == 0 else None
        panel.plot(range(1, len(accuracies) + 1), accuracies, color=COLORS[run["way"]], label=label)
    panel.axhline(100 * CHANCE, color="#8a8a8a", linewidth=0.8, linestyle="dotted")
    panel.set_ylim(0, 103)
    panel.set_xlabel("epoch")
    panel.set_ylabel("slides told right, %")
    seeds = result["options"]["seeds"]
    panel.set_title(f"the same network and steps, {seeds} seeds")
    panel.legend(frameon=False, loc="lower right")
    panel.spines[["top", "right"]].set_visible(False)
