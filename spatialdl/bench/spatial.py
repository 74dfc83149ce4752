"""Spatial parallelism against a single process.

On CPUs both use the same cores, and the single process runs twice: with PyTorch's memory settings,
and with those of `spatialdl.comm.allocator`, as the ranks have. With ``--device`` the single
process uses one accelerator, and each rank its own if there are enough.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.device import add_device
from spatialdl.bench.results import (
    CPU,
    heading,
    markdown,
    median_ratio,
    origin,
    parser_of,
    place,
    publish,
    save,
    words_of,
)
from spatialdl.bench.worker import CONVOLUTIONS, dims_of, name_of
from spatialdl.comm.device_path import device_of
from spatialdl.comm.launch import mpiexec_command
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.planning.worker import environment, run_worker

PLAIN = "plain PyTorch"
MEASURES = {
    "seconds": "time of a step, s",
    "cpu_seconds": "CPU seconds of a step",
    "memory_mb": "peak memory of a rank, MB",
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    sides = _sides(options)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    order = [side for _ in range(options.rounds) for side in sides]
    for side in tqdm(order, desc="runs", unit="run"):
        runs[side].append(run_worker(*sides[side]))
    result = summarise(options, runs)
    name = f"spatial-{name_of(options.model)}-{options.size}-{options.ranks}ranks"
    publish(result, table, draw, Path(options.out) / name)


def _sides(options: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each variant."""
    ranks, on_cpu = options.ranks, device_of(options.device).type == "cpu"
    sides = {PLAIN: _one_process(options, plain=True)}
    if on_cpu:
        sides["one process"] = _one_process(options, plain=False)
    if options.ddp:
        sides[f"DDP, {ranks} ranks"] = _ranks(options, ["--ddp"], plain=True)
    grid = ["--grid", *map(str, nearly_cubic(ranks, dims_of(options.model)))]
    if options.plain_ranks:
        sides[f"{ranks} plain ranks"] = _ranks(options, grid, plain=True)
    return {**sides, f"{ranks} ranks": _ranks(options, grid, plain=False)}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("spatial", __doc__)
    models = (
        f"function of spatialdl.models, {CONVOLUTIONS}, or package.module.function or "
        "file.py:function with an argument num_classes (%(default)s)"
    )
    parser.add_argument("--model", default="resnet18", help=models)
    parser.add_argument("--size", type=int, default=1024, help="side of the image (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images per step (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="tiles of the image (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="total threads (%(default)s)")
    parser.add_argument(
        "--plain-ranks", action="store_true", help="also run ranks with PyTorch's memory settings"
    )
    parser.add_argument("--ddp", action="store_true", help="also run PyTorch's DDP on the ranks")
    add_device(parser)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="runs per variant (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.size, options.batch, options.ranks, options.steps, options.rounds) < 1:
        raise ValueError("size, batch, ranks, steps and rounds must be at least 1")
    if options.ddp and options.batch % options.ranks:
        raise ValueError(
            f"--ddp: a batch of {options.batch} cannot be shared by {options.ranks} ranks"
        )
    if options.threads % options.ranks and options.ranks <= options.threads:
        raise ValueError(
            f"{options.threads} threads cannot be shared by {options.ranks} ranks: use a multiple"
        )
    return options


def _worker(options: argparse.Namespace) -> list[str]:
    return [
        *("-m", "spatialdl.bench.worker", "--model", options.model, "--size", str(options.size)),
        *("--batch", str(options.batch), "--steps", str(options.steps)),
        *("--device", options.device),
    ]


def _one_process(options: argparse.Namespace, plain: bool) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, *_worker(options)], environment(options.threads, plain)


def _ranks(
    options: argparse.Namespace, way: list[str], plain: bool
) -> tuple[list[str], dict[str, str]]:
    threads = max(1, options.threads // options.ranks)
    command = [*mpiexec_command(options.ranks), sys.executable, *_worker(options)]
    return [*command, *way], environment(threads, plain)


def summarise(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of all variants, and of ratios of the ranks to each other variant per run."""
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
        **origin("spatial", words_of(options)),
        "device": runs[many][0]["device"],
        "options": vars(options),
        "sides": values,
        "median": {
            side: {measure: statistics.median(found) for measure, found in measures.items()}
            for side, measures in values.items()
        },
        "ratio": {side: _ratios(values[many], values[side]) for side in values if side != many},
    }


def _ratios(many: dict[str, list[float]], one: dict[str, list[float]]) -> dict[str, float]:
    return {measure: median_ratio(many[measure], one[measure]) for measure in MEASURES}


def table(result: dict[str, Any]) -> str:
    """Table of the medians by variant."""
    sides, ratios = list(result["median"]), result["ratio"]
    rows = []
    for measure, title in MEASURES.items():
        medians = (_words(result["median"][side][measure]) for side in sides)
        rows.append([title, *medians, *(f"{ratio[measure]:.2f}" for ratio in ratios.values())])
    speeds = (f"{1 / ratio['seconds']:.2f} of {side}" for side, ratio in ratios.items())
    where = ", on the same cores" if result["device"] == CPU else ""
    lines = [
        *heading(result),
        *markdown(["", *sides, *(f"/ {side}" for side in ratios)], rows),
        "",
        f"speed of {sides[-1]}: {', '.join(speeds)}{where}",
    ]
    return "\n".join(lines)


def _words(value: float) -> str:
    """Two decimals, or three significant digits below 1."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians, with every run as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(result["median"]), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(MEASURES))
    options = result["options"]
    on_cpu = result["device"] == CPU
    threads = f"{options['threads']} threads in all" if on_cpu else place(result)
    size = "x".join([str(options["size"])] * dims_of(options["model"]))
    figure.suptitle(
        f"{name_of(options['model'])}, {size}, batch {options['batch']}, {threads}",
        fontsize=11,
    )
    for panel, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        sides = list(result["median"])
        heights = [result["median"][side][measure] for side in sides]
        colours = [*["#c9c9c9", "#8a8a8a", "#8fb3dd", "#8fb3dd"][: len(sides) - 1], "#1f5fa8"]
        panel.bar(sides, heights, color=colours, width=0.6)
        for position, side in enumerate(sides):
            found = result["sides"][side][measure]
            panel.plot([position] * len(found), found, "o", color="black", markersize=3)
        ratios = ", ".join(f"{ratio[measure]:.2f}" for ratio in result["ratio"].values())
        panel.set_title(f"{title}\nratios of {sides[-1]}: {ratios}", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
    save(figure, path)
