"""torch.distributed over mpi4py against gloo or NCCL and plain mpi4py, in one job."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spatialdl.bench.device import add_device, worker_command
from spatialdl.bench.results import (
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
from spatialdl.planning.worker import environment, run_worker

OURS, RAW, SILENT = "mpi4py backend", "raw mpi4py", "no communication"
CALL = "PyTorch's call"
COLORS = {OURS: "#1f5fa8", RAW: "#8a8a8a", SILENT: "#c9c9c9"}
COLOR_OF_OTHER = "#d0862a"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    command = worker_command("backend_worker", options.ranks, options)
    found = run_worker(command, environment(1), show=True)
    name = f"backend-{options.model}-{options.ranks}ranks"
    publish(summarise(options, found), table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("backend", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument(
        "--most", type=int, default=4**13, help="bytes of the largest all-reduce (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds of all-reduces (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps (%(default)s)")
    parser.add_argument(
        "--model", default="resnet50", help="function of spatialdl.models (%(default)s)"
    )
    parser.add_argument("--side", type=int, default=64, help="side of the images (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="images per rank (%(default)s)")
    add_device(parser)
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.most < 4:
        raise ValueError("ranks must be at least 2, most at least 4 bytes")
    if min(options.rounds, options.steps) < 2 or min(options.side, options.batch) < 1:
        raise ValueError("rounds and steps must be at least 2, side and batch at least 1")
    return options


def summarise(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and medians of differences and ratios per round."""
    sizes, other = {}, found["other"]
    for size, seconds in found["all_reduce"].items():
        sizes[size] = {
            "median": _medians(seconds),
            "above_raw_us": statistics.median(
                1e6 * (a - b) for a, b in zip(seconds[OURS], seconds[RAW], strict=True)
            ),
            "call_us": 1e6 * statistics.median(seconds[CALL]),
            "to_other": median_ratio(seconds[other], seconds[OURS]),
        }
    step = found["step"]
    return {
        **origin("backend", words_of(options)),
        "device": found["device"],
        "other": other,
        "mpi": found["mpi"].split(",")[0].strip(),
        "options": vars(options),
        "parameters": found["parameters"],
        "sizes": sizes,
        "step": {
            "median": _medians(step),
            "throughput_to_other": median_ratio(step[other], step[OURS]),
            "throughput_to_silent": median_ratio(step[SILENT], step[OURS]),
        },
        "seconds": found["all_reduce"],
        "step_seconds": step,
    }


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(result: dict[str, Any]) -> str:
    """Tables of microseconds of an all-reduce by size, and milliseconds of a training step."""
    options, other, step = result["options"], result["other"], result["step"]
    names = (OURS, RAW, other)
    titles = ["all-reduce, us", *names, "above raw", CALL, f"{other} / ours"]
    sums = []
    for size, found in result["sizes"].items():
        times = (f"{1e6 * found['median'][name]:.1f}" for name in names)
        more = (f"{found[key]:.1f}" for key in ("above_raw_us", "call_us"))
        sums.append([words(int(size)), *times, *more, f"{found['to_other']:.2f}"])
    images = options["batch"] * options["ranks"]
    steps = [
        [name, f"{1e3 * seconds:.0f}", f"{images / seconds:.2f}"]
        for name, seconds in step["median"].items()
    ]
    lines = [
        *heading(result),
        *markdown(titles, sums),
        "",
        f"{CALL}: overhead of PyTorch with an empty process group in Python",
        "",
        f"DistributedDataParallel, {options['model']} ({result['parameters'] / 1e6:.1f} M "
        f"parameters), {options['batch']} images of {options['side']}x{options['side']} a rank",
        "",
        *markdown(["", "step, ms", "images/s"], steps),
        "",
        f"throughput: {step['throughput_to_other']:.2f} of {other}'s, "
        f"{step['throughput_to_silent']:.2f} of that without communication (medians of the ratios)",
    ]
    return "\n".join(lines)


def words(size: int) -> str:
    """Bytes with a unit."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot time of all-reduces over their size, and throughput of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    times, bars = figure.subplots(1, 2, width_ratios=[2, 1])
    sizes = [int(size) for size in result["sizes"]]
    other = result["other"]
    for name in (RAW, other, OURS):
        medians = [1e6 * found["median"][name] for found in result["sizes"].values()]
        color = COLORS.get(name, COLOR_OF_OTHER)
        times.loglog(sizes, medians, "o-", color=color, label=name, markersize=3)
    times.set_xticks(sizes, [words(size) for size in sizes], rotation=45, fontsize=8)
    times.minorticks_off()
    times.set_ylabel("microseconds of an all-reduce", fontsize=9)
    times.legend(frameon=False, fontsize=9)
    options, step = result["options"], result["step"]
    images = options["batch"] * options["ranks"]
    names = list(step["median"])
    rates = [images / step["median"][name] for name in names]
    colors = [COLORS.get(name, COLOR_OF_OTHER) for name in names]
    bars.bar(range(len(names)), rates, color=colors, width=0.6)
    for position, rate in enumerate(rates):
        bars.text(position, rate, f"{rate:.1f}", ha="center", va="bottom", fontsize=9)
    bars.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=9)
    bars.set_ylabel("images per second", fontsize=9)
    bars.margins(y=0.12)
    bars.set_title(
        f"DDP, {options['model']}, {options['batch']} x {options['side']} x {options['side']} a "
        f"rank:\n{step['throughput_to_other']:.2f} of {other}'s throughput",
        fontsize=9,
    )
    times.set_title(
        f"{options['ranks']} ranks on {place(result)}, {result['mpi']}",
        fontsize=10,
    )
    save(figure, path)
