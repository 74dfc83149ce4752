"""Accuracy of two ways to train, over several seeds, on synthetic slides where they differ.

``tiles``: one network on whole slides and on their tiles of 256 pixels, with equal epochs and
pixels per step. Classes differ in two crescents some 1,000 pixels apart, which face each other or
away; a tile has the class of its slide, and a slide is predicted from the mean probabilities of its
tiles. ``bags``: an encoder and an aggregator on slides of tiles, two of which show the class, with
the encoder frozen at its random weights and end to end. Finished runs in the folder are reused.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.harness import (
    Bars,
    Lines,
    add_numbers,
    cached,
    markdown,
    origin,
    parser_of,
    publish,
    start,
)
from spatialdl.data.format import MANIFEST
from spatialdl.planning import calibrate
from spatialdl.slides.synthetic import ARRANGEMENTS, write_synthetic_slide

SIDE, TILE, MPP = 2048, 256, 0.5
BATCH = 8
"""Slides per step, whole or as tiles."""
WHOLE = {
    "1 rank": ("parallel=none",),
    "2 ranks": ("parallel=sp",),
    "4 ranks": ("parallel=sp", "parallel.grid=[2,2]"),
}
"""Layouts of whole images whose memory is measured, by number of ranks."""


class Arm(NamedTuple):
    """A way to train: overrides of the experiment, and options of the tiling of its data set."""

    settings: tuple[str, ...]
    cut: tuple[str, ...] = ()


class Task(NamedTuple):
    """A task: its experiment, two arms, metric, and defaults of the options.

    Attributes:
        memory: further runs of a few steps of the first arm, whose memory is measured.
    """

    experiment: str
    arms: dict[str, Arm]
    metric: str
    defaults: dict[str, int]
    memory: dict[str, tuple[str, ...]]


def tasks() -> dict[str, Task]:
    """The tasks; the tiles of a step are drawn from all slides."""
    tiles = BATCH * (SIDE // TILE) ** 2
    whole = Arm((*WHOLE["2 ranks"], f"data.batch_size={BATCH}"), ("--whole",))
    votes = Arm(("parallel=dp", f"data.batch_size={tiles}"), ("--tile-size", str(TILE)))
    short = ("trainer.max_steps=8", "trainer.validate_every=8", f"data.batch_size={BATCH}")
    return {
        "tiles": Task(
            "whole_vs_tiles",
            {"whole images": whole, f"tiles of {TILE}, votes": votes},
            "slide_accuracy",
            {"slides": 256, "validation": 64, "epochs": 5},
            {name: (*layout, *short) for name, layout in WHOLE.items()},
        ),
        "bags": Task(
            "bag_end_to_end",
            {"end to end": Arm(()), "frozen encoder": Arm(("trainer.freeze=[encoder.*]",))},
            "accuracy",
            {"slides": 400, "validation": 200, "epochs": 14},
            {},
        ),
    }


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    task = tasks()[options.task]
    folder = Path(options.folder) / f"{options.task}-{options.slides}+{options.validation}"
    data = _prepare(folder, options) if options.task == "tiles" else {}
    runs = []
    turns = [(seed, arm) for seed in range(options.seeds) for arm in task.arms]
    for seed, arm in tqdm(turns, "training", unit="run"):
        words = _words(options, task, arm, seed, data)
        found = _train(folder / f"{list(task.arms).index(arm)}-seed{seed}", words)
        curve = [row[task.metric] for row in found["validation"]]
        runs.append({"arm": arm, "seed": seed, "curve": curve, **found})
    memory = {}
    first = next(iter(task.arms))
    for name, settings in task.memory.items():
        words = [f"experiment={task.experiment}", *settings, *data[first]]
        memory[name] = _train(folder / f"memory-{name[0]}", words)["memory_mb"]
    result = {
        **origin("accuracy", arguments),
        **{"options": vars(options), "runs": runs, "memory_mb": memory},
    }
    publish(result, table(result), _panels(result), Path(options.out) / f"accuracy-{options.task}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("accuracy", __doc__)
    parser.add_argument("task", choices=("tiles", "bags"), help="what is compared")
    text = "folder of slides, data sets and finished runs, of tiles 10 GB (%(default)s)"
    parser.add_argument("--folder", default="outputs/bench/accuracy", help=text)
    least = {"slides": BATCH, "validation": 2, "epochs": 1}
    add_numbers(
        parser,
        seeds=(3, 1, "runs per arm"),
        **{name: (0, number, f"{name}, 0: by task") for name, number in least.items()},
    )
    options = parser.parse_args(arguments)
    for name, default in tasks()[options.task].defaults.items():
        setattr(options, name, getattr(options, name) or default)
    return options


def _words(
    options: argparse.Namespace, task: Task, arm: str, seed: int, data: dict[str, list[str]]
) -> list[str]:
    """Overrides of a run."""
    words = [f"experiment={task.experiment}", *task.arms[arm].settings, f"seed={seed}"]
    words.append(f"trainer.max_epochs={options.epochs}")
    if not data:
        return [
            *words,
            f"data.slides={options.slides}",
            f"data.validation_slides={options.validation}",
        ]
    return [*words, *data[arm]]


def _train(run_dir: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Validations, memory and time of a run, cached.

    Raises:
        RuntimeError: it failed, or was interrupted.
    """

    def train() -> dict[str, Any]:
        shutil.rmtree(run_dir, ignore_errors=True)  # remains of an interrupted run
        command = [
            *(sys.executable, "-m", "spatialdl.train", *settings, f"hydra.run.dir={run_dir}"),
            *("trainer.checkpoint.keep=0", "trainer.report=false"),
        ]
        started, used = time.monotonic(), _cpu_seconds()
        calibrate.run(command, calibrate.environment(1))
        if not (run_dir / "summary.json").exists():
            raise RuntimeError(f"the run in {run_dir} was interrupted: run the same command again")
        summary = json.loads((run_dir / "summary.json").read_text())
        return {
            **{"validation": summary["validation"], "steps": len(summary["loss"])},
            **{"seconds": time.monotonic() - started, "cpu_seconds": _cpu_seconds() - used},
            "memory_mb": max(summary["peak_memory_mb"]),
        }

    return cached(run_dir.with_name(f"{run_dir.name}.json"), settings, train)


def _cpu_seconds() -> float:
    """CPU seconds of terminated child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- slides and their data sets


def _prepare(folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Draw the slides and tile them for both arms; returns overrides of the data by arm."""
    draw_slides(folder, options.slides, options.validation)
    found = {}
    for number, (name, arm) in enumerate(tasks()["tiles"].arms.items()):
        out = folder / f"data-{number}"
        if not (out / MANIFEST).exists():
            command = [
                *(sys.executable, "-m", "spatialdl.slides.tile_cli", str(folder / "slides")),
                *(*arm.cut, "--out", str(out), "--labels", str(folder / "labels.csv")),
                *("--mpp", str(MPP), "--min-tissue", "0", "--jobs", "2"),
            ]
            calibrate.run(command, calibrate.environment(1), show=True)
        found[name] = [f"data.path={out}"]
    return found


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
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(write_synthetic_slide, slides / name, kind, (SIDE, SIDE), MPP, seed=number)
            for number, (name, kind, _) in enumerate(rows)
            if not (slides / name).exists()
        ]
        for job in tqdm(jobs, "drawing slides", unit="slide"):
            job.result()


# --- report


def table(result: dict[str, Any]) -> list[str]:
    """Table of accuracy by seed, memory and time of both arms, and memory by number of ranks."""
    options, rows = result["options"], []
    for arm in tasks()[options["task"]].arms:
        runs = [run for run in result["runs"] if run["arm"] == arm]
        last = [run["curve"][-1] for run in runs]
        times = (statistics.median(run[k] for run in runs) for k in ("seconds", "cpu_seconds"))
        rows.append(
            [
                *(arm, *(f"{100 * value:.1f}%" for value in (*last, statistics.mean(last)))),
                *(f"{max(run['memory_mb'] for run in runs):.0f}", str(runs[0]["steps"])),
                *(f"{value:.0f}" for value in times),
            ]
        )
    seeds = (f"seed {seed}" for seed in range(options["seeds"]))
    titles = ["", *seeds, "mean", "MB per rank", "steps", "s per run", "CPU s"]
    about = f"accuracy on {options['validation']} validation slides after {options['epochs']} "
    lines = [*markdown(titles, rows), "", about + f"epochs of {options['slides']}; chance: 50%"]
    if result["memory_mb"]:
        many = (f"{mb:.0f} on {ranks}" for ranks, mb in result["memory_mb"].items())
        lines.append(f"MB per rank of whole images, {BATCH} a step: {', '.join(many)}")
    return lines


def _panels(result: dict[str, Any]) -> list[Bars | Lines]:
    """Means over the seeds by epoch, and memory over ranks."""
    curves = {}
    for arm in tasks()[result["options"]["task"]].arms:
        runs = [run["curve"] for run in result["runs"] if run["arm"] == arm]
        means = [100 * statistics.mean(values) for values in zip(*runs, strict=True)]
        curves[arm] = [(float(epoch), mean) for epoch, mean in enumerate(means, 1)]
    title = f"validation slides, mean of {result['options']['seeds']} seeds; dashed: chance"
    panels: list[Bars | Lines] = [Lines(title, "epoch", "correct, %", curves, mark=50)]
    if result["memory_mb"]:
        memory = {name: [mb] for name, mb in result["memory_mb"].items()}
        panels.append(Bars("whole images, MB per rank", memory))
    return panels


if __name__ == "__main__":
    start(main)
