"""Spatial parallelism against one process on the same cores, alternately in one go.

One process is there twice: as PyTorch comes, and with the memory settings of `spatialdl.allocator`,
which the ranks have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.results import machine, publish
from spatialdl.bench.worker import CONVOLUTIONS, dims_of
from spatialdl.comm.launch import mpiexec_command
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.worker import environment, run_worker

PLAIN = "plain PyTorch"
MEASURES = {
    "seconds": "time of a step, s",
    "cpu_seconds": "CPU seconds of a step",
    "memory_mb": "peak memory of a rank, MB",
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    sides = {
        PLAIN: _one_process(options, plain=True),
        "one process": _one_process(options, plain=False),
    }
    if options.plain_ranks:
        sides[f"{options.ranks} plain ranks"] = _ranks(options, plain=True)
    sides[f"{options.ranks} ranks"] = _ranks(options, plain=False)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    order = [side for _ in range(options.rounds) for side in sides]
    for side in tqdm(order, desc="runs", unit="run"):
        runs[side].append(run_worker(*sides[side]))
    result = summarise(options, runs)
    name = f"spatial-{options.model}-{options.size}-{options.ranks}ranks"
    publish(result, table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.bench spatial", description=__doc__)
    models = f"of spatialdl.models, or {CONVOLUTIONS} (%(default)s)"
    parser.add_argument("--model", default="resnet18", help=models)
    parser.add_argument("--size", type=int, default=1024, help="side of the image (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images a step (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="tiles of the image (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads in all (%(default)s)")
    parser.add_argument(
        "--plain-ranks", action="store_true", help="also ranks with PyTorch's memory settings"
    )
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


def _one_process(options: argparse.Namespace, plain: bool) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, *_worker(options)], environment(options.threads, plain)


def _ranks(options: argparse.Namespace, plain: bool) -> tuple[list[str], dict[str, str]]:
    threads = max(1, options.threads // options.ranks)
    command = [*mpiexec_command(options.ranks), sys.executable, *_worker(options)]
    grid = ["--grid", *map(str, nearly_cubic(options.ranks, dims_of(options.model)))]
    return [*command, *grid], environment(threads, plain)


def summarise(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of all sides, and the ratios of the ranks to the others, run by run."""
    values = {
        side: {
            "seconds": [statistics.median(run["seconds"]) for run in found],
            "cpu_seconds": [run["cpu_seconds"] for run in found],
            "memory_mb": [run["memory_mb"] for run in found],
        }
        for side, found in runs.items()
    }
    many = list(values)[-1]
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
        "ratio": {side: _ratios(values[many], values[side]) for side in values if side != many},
    }


def _ratios(many: dict[str, list[float]], one: dict[str, list[float]]) -> dict[str, float]:
    return {
        measure: statistics.median(b / a for a, b in zip(one[measure], many[measure], strict=True))
        for measure in MEASURES
    }


def _options_given(options: argparse.Namespace) -> list[str]:
    given = [f"--{k} {v}" for k, v in vars(options).items() if k not in ("out", "plain_ranks")]
    return [*given, *["--plain-ranks"] * options.plain_ranks]


def table(result: dict[str, Any]) -> str:
    """The medians side by side, as text."""
    sides, ratios = list(result["median"]), result["ratio"]
    lines = [
        f"{result['command']}",
        f"{result['machine']}, {result['date']}",
        "",
        f"{'':26}" + "".join(f"{side:>17}" for side in (*sides, *(f"/ {s}" for s in ratios))),
    ]
    for measure, title in MEASURES.items():
        medians = [result["median"][side][measure] for side in sides]
        found = [*medians, *(ratio[measure] for ratio in ratios.values())]
        lines.append(f"{title:26}" + "".join(f"{value:17.2f}" for value in found))
    speeds = (f"{1 / ratio['seconds']:.2f} of {side}" for side, ratio in ratios.items())
    lines.append(f"\nspeed of {sides[-1]}: {', '.join(speeds)}, on the same cores")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians with every run as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(result["median"]), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(MEASURES))
    options = result["options"]
    size = "x".join([str(options["size"])] * dims_of(options["model"]))
    figure.suptitle(
        f"{options['model']}, {size}, batch {options['batch']}, "
        f"{options['threads']} threads in all",
        fontsize=11,
    )
    for panel, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        sides = list(result["median"])
        heights = [result["median"][side][measure] for side in sides]
        colours = ["#c9c9c9", "#8a8a8a", *["#8fb3dd"] * (len(sides) - 3), "#1f5fa8"]
        panel.bar(sides, heights, color=colours, width=0.6)
        for position, side in enumerate(sides):
            found = result["sides"][side][measure]
            panel.plot([position] * len(found), found, "o", color="black", markersize=3)
        ratios = ", ".join(f"{ratio[measure]:.2f}" for ratio in result["ratio"].values())
        panel.set_title(f"{title}\n{sides[-1]}: {ratios} of the others", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
