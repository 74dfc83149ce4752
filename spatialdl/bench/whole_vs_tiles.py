"""Whole images on several ranks against tiles with votes, for classes by arrangement.

Draws slides of 2048 pixels with two crescents some 1,000 pixels apart, which face each other or
away, and trains one network on whole slides and on tiles of 256 pixels, with equal epochs and
pixels per step. A tile has the class of its slide; a slide is predicted from the mean probabilities
of its tiles. Finished runs in the folder are reused.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from spatialdl.bench.results import origin, parser_of, publish, words_of
from spatialdl.bench.whole_vs_tiles_picture import draw
from spatialdl.data.format import MANIFEST
from spatialdl.data.saving import save_json
from spatialdl.planning import worker
from spatialdl.slides.synthetic.drawing import ARRANGEMENTS, write_synthetic_slide

SIDE, TILE, MPP = 2048, 256, 0.5
BATCH = 8
"""Slides per step, whole or as tiles."""
CHANCE = 0.5
_COMMAND = ("-m", "spatialdl.train", "experiment=whole_vs_tiles")
LAYOUTS = {
    1: ("parallel=none",),
    2: ("parallel=sp",),
    4: ("parallel=sp", "parallel.grid=[2,2]"),
}
"""Layouts of whole images whose memory is measured, by number of ranks."""


class Arm(NamedTuple):
    """An arm of the comparison: title, options of the tiling, overrides of the preset."""

    title: str
    cut: tuple[str, ...]
    settings: tuple[str, ...]


def arms() -> dict[str, Arm]:
    """Both arms, by folder name; the tiles of a step are drawn from all slides."""
    tiles = BATCH * (SIDE // TILE) ** 2
    dp = ("parallel=dp", f"data.batch_size={tiles}")
    return {
        "whole": Arm("whole images", ("--whole",), _whole(2)),
        "tiles": Arm(f"tiles of {TILE}, votes", ("--tile-size", str(TILE)), dp),
    }


def _whole(ranks: int) -> tuple[str, ...]:
    return (*LAYOUTS[ranks], f"data.batch_size={BATCH}")


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    folder = Path(options.folder) / f"{options.slides}+{options.validation}"
    preparing = prepare(folder, options)
    turns = [(arm, seed) for seed in range(options.seeds) for arm in arms()]
    with tqdm(total=len(turns) + len(LAYOUTS), desc="training", unit="run") as bar:
        runs = []
        for arm, seed in turns:
            bar.set_postfix_str(f"{arm}, seed {seed}")
            runs.append({"arm": arm, "seed": seed, **train(folder, arm, seed, options.epochs)})
            bar.update()
        memory = []
        for ranks in LAYOUTS:
            bar.set_postfix_str(f"memory of {ranks} ranks")
            memory.append({"ranks": ranks, **measure_memory(folder, ranks)})
            bar.update()
    result = summarise(options, runs, memory, preparing)
    publish(result, table, draw, Path(options.out) / "whole-vs-tiles")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("whole_vs_tiles", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs per arm (%(default)s)")
    add("--slides", type=int, default=256, help="training slides (%(default)s)")
    add("--validation", type=int, default=64, help="validation slides (%(default)s)")
    add("--epochs", type=int, default=5, help="epochs per run (%(default)s)")
    add(
        "--folder",
        default="outputs/bench/whole_vs_tiles",
        help="folder of slides, data sets and finished runs, 10 GB (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if min(options.seeds, options.epochs) < 1:
        raise ValueError("seeds and epochs must be at least 1")
    if options.slides < BATCH or options.validation < 2:
        raise ValueError(f"slides must be at least {BATCH} (a step), validation at least 2")
    return options


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Draw the slides and tile them for both arms; returns the time, cached."""

    def work() -> dict[str, Any]:
        draw_slides(folder, options.slides, options.validation)
        for name, arm in arms().items():
            cut(folder, name, arm)
        return {}

    return _once(folder / "prepared.json", work)


def draw_slides(folder: Path, training: int, validation: int) -> None:
    """Write slides of alternating classes, each with its own seed, and `labels.csv`."""
    slides = folder / "slides"
    slides.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(training + validation):
        split = "train" if number < training else "val"
        rows.append((f"{number:04d}.tif", ARRANGEMENTS[number % 2], split))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "split"), *rows])
    size = (SIDE, SIDE)
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(write_synthetic_slide, slides / name, kind, size, MPP, seed=number)
            for number, (name, kind, _) in enumerate(rows)
            if not (slides / name).exists()
        ]
        for job in tqdm(jobs, "drawing slides", unit="slide"):
            job.result()


def cut(folder: Path, name: str, arm: Arm) -> None:
    """Write the data set of an arm with the tiling command."""
    if (folder / name / MANIFEST).exists():
        return
    command = [
        *(sys.executable, "-m", "spatialdl.slides.command", str(folder / "slides"), *arm.cut),
        *("--out", str(folder / name), "--labels", str(folder / "labels.csv")),
        *("--mpp", str(MPP), "--min-tissue", "0", "--jobs", "2"),
    ]
    worker.run(command, worker.environment(1), show=True)


def train(folder: Path, arm: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train; returns accuracy on the validation slides by epoch, peak memory and time."""
    settings = [*arms()[arm].settings, f"seed={seed}", f"trainer.max_epochs={epochs}"]
    run = folder / "runs" / f"{arm}-{epochs}epochs-seed{seed}"
    summary = _trained(folder / arm, run, settings)
    validations = summary["validation"]
    return {
        "accuracy": validations[-1]["slide_accuracy"],
        "slides": validations[-1]["slides"],
        "steps": len(summary["loss"]),
        "loss": statistics.mean(summary["loss"][-(len(summary["loss"]) // epochs) :]),
        "memory_mb": max(summary["peak_memory_mb"]),
        **_time(summary),
        "curve": [row["slide_accuracy"] for row in validations],
    }


def measure_memory(folder: Path, ranks: int) -> dict[str, float]:
    """Peak MB of the largest rank on whole images, and the time.

    Enough steps, and a validation, to include all prefetched batches.
    """
    settings = [*_whole(ranks), "trainer.max_steps=8", "trainer.validate_every=8"]
    summary = _trained(folder / "whole", folder / "runs" / f"memory-{ranks}ranks", settings)
    return {"memory_mb": max(summary["peak_memory_mb"]), **_time(summary)}


def _trained(data: Path, run: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Summary of a run with its time, cached."""

    def work() -> dict[str, Any]:
        command = [
            *(sys.executable, *_COMMAND, *settings),
            *(f"data.path={data}", f"hydra.run.dir={run}", "trainer.checkpoint.keep=0"),
        ]
        worker.run(command, worker.environment(1))
        if not (run / "summary.json").exists():
            raise RuntimeError(f"the run in {run} was interrupted: repeat the command to resume")
        found: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return found

    return _once(run / "finished.json", work)


def _once(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of `work` and its time, cached in a file."""
    if not path.exists():
        started, used = time.monotonic(), _cpu_seconds()
        found = work()
        spent = {"seconds": time.monotonic() - started, "cpu_seconds": _cpu_seconds() - used}
        save_json(path, {**found, **spent})
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def _time(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in ("seconds", "cpu_seconds")}


def _cpu_seconds() -> float:
    """CPU seconds of terminated child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summarise(
    options: argparse.Namespace,
    runs: Sequence[dict[str, Any]],
    memory: Sequence[dict[str, Any]],
    preparing: dict[str, float],
) -> dict[str, Any]:
    """Accuracies and medians of the runs, by arm."""
    found = {}
    for name, arm in arms().items():
        own = [run for run in runs if run["arm"] == name]
        accuracies = [run["accuracy"] for run in own]
        found[name] = {
            "title": arm.title,
            "accuracies": accuracies,
            "mean": statistics.mean(accuracies),
            "memory_mb": max(run["memory_mb"] for run in own),
            "seconds": statistics.median(run["seconds"] for run in own),
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in own),
            "steps": own[0]["steps"],
        }
    everything = [preparing, *runs, *memory]
    return {
        **origin("whole_vs_tiles", words_of(options)),
        "options": vars(options),
        "side": SIDE,
        "tile": TILE,
        "found": found,
        "memory_mb": {str(one["ranks"]): one["memory_mb"] for one in memory},
        "runs": list(runs),
        "preparing": preparing,
        "seconds": sum(one["seconds"] for one in everything),
        "cpu_seconds": sum(one["cpu_seconds"] for one in everything),
    }


def table(result: dict[str, Any]) -> str:
    """Table of accuracy, memory and time of both arms, and memory by number of ranks."""
    options = result["options"]
    heads = f"{'accuracy':>10}{'of the seeds':>16}{'MB a rank':>12}{'steps':>8}{'s a run':>10}"
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}, {result['seconds'] / 60:.0f} minutes, "
        f"{result['cpu_seconds'] / 60:.0f} CPU minutes",
        "",
        f"{'':22}{heads}{'CPU s':>8}",
    ]
    for one in result["found"].values():
        lowest, highest = min(one["accuracies"]), max(one["accuracies"])
        spread = f"{100 * lowest:.1f} to {100 * highest:.1f}%"
        lines.append(
            f"{one['title']:22}{100 * one['mean']:9.1f}%{spread:>16}{one['memory_mb']:12.0f}"
            f"{one['steps']:8}{one['seconds']:10.0f}{one['cpu_seconds']:8.0f}"
        )
    many = [f"{mb:.0f} on {_ranks(ranks)}" for ranks, mb in result["memory_mb"].items()]
    lines += [
        "",
        f"accuracy: on {options['validation']} validation slides after the last epoch; "
        f"chance: {100 * CHANCE:.0f}%",
        f"MB a rank of whole images, {BATCH} a step: {', '.join(many)}",
    ]
    return "\n".join(lines)


def _ranks(count: str) -> str:
    return "1 rank" if count == "1" else f"{count} ranks"
