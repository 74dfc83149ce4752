"""Spatial parallelism against one process on the same cores, alternately in one go."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.results import grid_of, machine, publish, run_worker
from spatialdl.comm.launch import mpiexec_command

MEASURES = {
    "seconds": "time of a step, s",
    "cpu_seconds": "CPU seconds of a step",
    "memory_mb": "peak memory of a rank, MB",
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    sides = {
        "one process": _one_process(options),
        f"{options.ranks} ranks": _ranks(options),
    }
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    order = [side for _ in range(options.rounds) for side in sides]
    for side in tqdm(order, desc="runs", unit="run"):
        runs[side].append(run_worker(*sides[side]))
    result = summarise(options, runs)
    name = f"spatial-{options.model}-{options.size}-{options.ranks}ranks"
    publish(result, table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.bench spatial", description=__doc__)
    parser.add_argument("--model", default="resnet18", help="of spatialdl.models (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="side of the image (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images a step (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="tiles of the image (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads in all (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each side (%(default)s)")
    parser.add_argument("--out", default="outputs/bench", help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.size, options.batch, options.ranks, options.steps, options.rounds) < 1:
        raise ValueError("size, batch, ranks, steps and rounds must be at least 1")
    if options.threads % options.ranks and options.ranks <= options.threads:
        raise ValueError(
            f"{options.threads} threads cannot be shared by {options.ranks} ranks: take a multiple"
        )
    return options


def _worker(options: argparse.Namespace) -> list[str]:
    return [
        *("-m", "spatialdl.bench.worker", "--model", options.model, "--size", str(options.size)),
        *("--batch", str(options.batch), "--steps", str(options.steps)),
    ]


def _one_process(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, *_worker(options)], _environment(options.threads)


def _ranks(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    threads = max(1, options.threads // options.ranks)
    command = [*mpiexec_command(options.ranks), sys.executable, *_worker(options)]
    grid = ["--grid", *map(str, grid_of(options.ranks))]
    return [*command, *grid], _environment(threads)


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1"}


def summarise(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of both sides, and the ratios of the ranks to one process, run by run."""
    values = {
        side: {
            "seconds": [statistics.median(run["seconds"]) for run in found],
            "cpu_seconds": [run["cpu_seconds"] for run in found],
            "memory_mb": [run["memory_mb"] for run in found],
        }
        for side, found in runs.items()
    }
    one, many = values.values()
    return {
        "command": " ".join(["python -m spatialdl.bench spatial", *_options_given(options)]),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "options": vars(options),
        "sides": values,
        "median": {
            side: {measure: statistics.median(found) for measure, found in measures.items()}
            for side, measures in values.items()
        },
        "ratio": _ratios(many, one),
        "speed": 1 / _ratios(many, one)["seconds"],
    }


def _ratios(many: dict[str, list[float]], one: dict[str, list[float]]) -> dict[str, float]:
    return {
        measure: statistics.median(b / a for a, b in zip(one[measure], many[measure], strict=True))
        for measure in MEASURES
    }


def _options_given(options: argparse.Namespace) -> list[str]:
    return [f"--{key} {value}" for key, value in vars(options).items() if key != "out"]


def table(result: dict[str, Any]) -> str:
    """The medians side by side, as text."""
    sides = list(result["median"])
    lines = [
        f"{result['command']}",
        f"{result['machine']}, {result['date']}",
        "",
        f"{'':28}" + "".join(f"{side:>14}" for side in sides) + f"{'ratio':>10}",
    ]
    for measure, title in MEASURES.items():
        row = "".join(f"{result['median'][side][measure]:14.2f}" for side in sides)
        lines.append(f"{title:28}{row}{result['ratio'][measure]:10.2f}")
    lines.append(f"\nspeed of {sides[1]}: {result['speed']:.2f} of one process on the same cores")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians with every run as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(MEASURES))
    options = result["options"]
    figure.suptitle(
        f"{options['model']}, {options['size']}x{options['size']}, batch {options['batch']}, "
        f"{options['threads']} threads in all",
        fontsize=11,
    )
    for panel, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        sides = list(result["median"])
        heights = [result["median"][side][measure] for side in sides]
        panel.bar(sides, heights, color=["#8a8a8a", "#1f5fa8"], width=0.6)
        for position, side in enumerate(sides):
            found = result["sides"][side][measure]
            panel.plot([position] * len(found), found, "o", color="black", markersize=3)
        panel.set_title(f"{title}\nratio {result['ratio'][measure]:.2f}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
