"""Shared parts of the benchmarks: options, turns, ranks, results and pictures.

A benchmark measures its sides in turns, in one run, so that other load of a shared machine meets
all of them, and compares medians and medians of the ratios of each round. ``python -m
benchmarks.harness NAME OPTIONS`` is a rank, as `run_ranks` starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from spatialdl.comm import device_path as paths
from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_of, device_path
from spatialdl.comm.launch import launched, mpiexec_command
from spatialdl.common.files import load_json, save_json
from spatialdl.planning.calibrate import environment, run_worker

ROOT = Path(__file__).resolve().parent.parent
CPU = "CPU"
"""Device name of CPUs; the machine's description has the model."""
BLUE, COLOURS = "#1f5fa8", ("#d0862a", "#5a9e5a", "#8a8a8a", "#8fb3dd", "#b03030", "#c9c9c9")
Found = TypeVar("Found")


# --- options


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Parser of a benchmark's command line, with ``--out`` for `publish`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--out", default="outputs/bench", help="output folder (%(default)s)")
    return parser


def add_numbers(
    parser: argparse.ArgumentParser, **numbers: tuple[int | Sequence[int], int, str]
) -> None:
    """Add options of whole numbers.

    Args:
        parser: the parser.
        numbers: by option, with underscores: default (several values: a list), least value, help.
    """
    for name, (default, least, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=at_least(least),
            default=default,
            nargs=None if isinstance(default, int) else "+",
            help=f"{text} (%(default)s)",
        )


def at_least(least: int) -> Callable[[str], int]:
    """Type of an option: a whole number that is at least `least`."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return integer


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--device``."""
    text = "cpu, auto (accelerator if available, otherwise cpu), or a device type such as cuda"
    parser.add_argument("--device", default="cpu", help=f"{text} (%(default)s)")


def start(main: Callable[[Sequence[str]], None]) -> None:
    """Run a benchmark with the options of the command line."""
    try:
        main(sys.argv[1:])
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


# --- turns


def alternate(sides: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Measure each side once a round, in reversed order every other round.

    Returns:
        By side, what it returned in each round.
    """
    found: dict[str, list[Found]] = {name: [] for name in sides}
    with tqdm(total=rounds * len(sides), unit="run") as bar:
        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                bar.set_postfix_str(name)
                found[name].append(sides[name]())
                bar.update()
    return found


def time_calls(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    device: torch.device,
    world: Communicator,
) -> dict[str, list[float]]:
    """Seconds of a call on the slowest rank, by variant and round.

    Variants run in a random order each round, so that none profits from the caches of another.
    """
    for work in variants.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    draw = random.Random(0)  # the same order on all ranks
    watch = Stopwatch(device)
    for _ in range(rounds):
        for name in draw.sample(list(variants), len(variants)):
            world.barrier()
            watch.start()
            for _ in range(calls):
                variants[name]()
            seconds[name].append(max(world.allgather(watch.stop() / calls)))
    return seconds


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Median of the ratios per round."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


# --- ranks


def rank_command(name: str, options: argparse.Namespace, ranks: int) -> list[str]:
    """Command of ``work(options)`` of a module of this folder, in one process or on ranks."""
    words = [sys.executable, "-m", "benchmarks.harness", name, json.dumps(vars(options))]
    return [*(mpiexec_command(ranks) if ranks > 1 else ()), *words]


def rank_environment(
    threads: int, plain: bool = False, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of `rank_command`; see `spatialdl.planning.calibrate.environment`."""
    found = {**environment(threads, plain), **(variables or {})}
    path = os.pathsep.join(filter(None, [found.get("PYTHONPATH"), str(ROOT)]))
    return {**found, "PYTHONPATH": path}


def run_ranks(
    name: str,
    options: argparse.Namespace,
    ranks: int = 1,
    *,
    threads: int = 1,
    plain: bool = False,
    show: bool = False,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``work(options)`` of a module of this folder; returns what it returned on rank 0.

    Args:
        name: the module.
        options: options that JSON can hold; ``device`` is set before MPI starts.
        ranks: number of ranks; one is a process without MPI.
        threads: threads of each rank.
        plain: whether to keep PyTorch's memory settings.
        show: whether ranks write to this process's standard error.
        variables: further environment variables.
    """
    command = rank_command(name, options, ranks)
    return run_worker(command, rank_environment(threads, plain, variables), show)


def _work(name: str, options: argparse.Namespace) -> None:
    """Be a rank; imports of the module may start MPI, which needs the device before."""
    install_abort_hook()
    take_device(getattr(options, "device", "cpu"))
    found = import_module(f"benchmarks.{name}").work(options)
    if found is not None:
        print(json.dumps(found), flush=True)


def take_device(name: str) -> torch.device:
    """Set and return the current device of this rank; to be called before MPI starts.

    Rank i of a machine uses device i, modulo the number of devices.

    Raises:
        ValueError: PyTorch has no such device.
    """
    info = launched()
    if name != "cpu" and info is not None and torch.accelerator.is_available():
        paths.take_device(info.local_rank % torch.accelerator.device_count())
    return device_of(name)


def describe(device: torch.device) -> str:
    """Name of the device, and the transfer path between ranks."""
    if device.type == "cpu":
        return CPU
    name = str(torch.get_device_module(device).get_device_name(device))
    path = device_path()
    return name if launched() is None else f"{name}, tensors by {path.name} ({path.reason})"


class Stopwatch:
    """Stopwatch for work on a device, without the latency of synchronisation.

    It uses events in the current stream on an accelerator, and the host's clock on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0.0
        self._first: torch.Event | None = None

    def start(self) -> None:
        """Start after all previous work of the device."""
        if self._device.type == "cpu":
            self._began = time.perf_counter()
            return
        torch.accelerator.synchronize(self._device)
        self._first = self._event()

    def stop(self) -> float:
        """Seconds since `start`, after all work of the device since then."""
        if self._first is None:
            return time.perf_counter() - self._began
        last = self._event()
        torch.accelerator.synchronize(self._device)
        return float(self._first.elapsed_time(last)) / 1000

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


# --- results


def origin(name: str, arguments: Sequence[str], device: str = CPU) -> dict[str, Any]:
    """Command without ``--out``, machine, device and date of a benchmark."""
    previous = ["", *arguments]
    words = [
        word
        for word, before in zip(arguments, previous, strict=False)
        if not word.startswith("--out") and before != "--out"
    ]
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *words])
    machine = f"{os.cpu_count()} cores, {cpu_model()}"
    return {
        **{"command": command, "machine": machine, "device": device},
        "date": time.strftime("%Y-%m-%d"),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cached(path: Path, words: Sequence[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of `work`, cached in a JSON file under the same words."""
    kept = load_json(path)
    if kept is None or kept["words"] != list(words):
        kept = {"words": list(words), "found": work()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json(path, kept)
    found: dict[str, Any] = kept["found"]
    return found


def heading(result: Mapping[str, Any]) -> list[str]:
    """Heading lines: command, machine, device, MPI and date."""
    found = [result[key] for key in ("machine", "device", "mpi") if key in result]
    where = ", ".join([*(text for text in found if text != CPU), result["date"]])
    return [f"`{result['command']}`", "", where, ""]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of an aligned table in Markdown: first column left, all others right.

    Args:
        titles: titles of the columns.
        rows: cells by row.
    """
    lines = [list(titles), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [_line(cells, widths) for cells in (lines[0], rule, *lines[1:])]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(padded)} |"


def publish(
    result: dict[str, Any], lines: Sequence[str], panels: Sequence[Bars | Lines], path: Path
) -> None:
    """Print a result in Markdown, and write `path`.md, .json and .png.

    Args:
        result: what `origin` returns, and measurements.
        lines: the tables, without `heading`.
        panels: the picture.
        path: path without suffix.
    """
    text = "\n".join([*heading(result), *lines])
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.md").write_text(text + "\n")
    path.with_name(f"{path.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    place = (result["machine"] if result["device"] == CPU else result["device"]).partition(",")[0]
    draw(path.with_name(f"{path.name}.png"), f"{path.name}, {place}", panels)
    print(f"\nwritten: {path}.md, .json and .png")


# --- pictures


class Bars(NamedTuple):
    """Panel of horizontal bars, with every round as a point.

    Attributes:
        title: what the values are, with the unit.
        values: one value per round, by name; the bar is their median.
        texts: texts behind the bars; the median by default.
        ours: names of the blue bars.
        mark: value of a dashed line.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    texts: Mapping[str, str] = {}
    ours: Collection[str] = ()
    mark: float | None = None


class Lines(NamedTuple):
    """Panel of curves.

    Attributes:
        title: of the panel.
        x, y: labels of the axes.
        curves: points (x, y) by name.
        log: logarithmic axes: "", "x" or "xy".
        mark: value of a dashed horizontal line.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    log: str = ""
    mark: float | None = None


def draw(path: Path, title: str, panels: Sequence[Bars | Lines], columns: int = 3) -> None:
    """Write a picture of panels, in rows of `columns`."""
    from matplotlib.figure import Figure

    rows, columns = -(-len(panels) // columns), min(columns, len(panels))
    most = max(len(one.values) if isinstance(one, Bars) else 8 for one in panels)
    size = (5.2 * columns, (1.3 + 0.36 * most) * rows)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place, panel in zip(places, panels, strict=False):
        place.set_title(panel.title, fontsize=9)
        place.tick_params(labelsize=8)
        place.spines[["top", "right"]].set_visible(False)
        if isinstance(panel, Bars):
            _draw_bars(place, panel)
        else:
            _draw_lines(place, panel)
    figure.savefig(path)


def short(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _draw_bars(place: Any, panel: Bars) -> None:
    for row, (name, values) in enumerate(panel.values.items()):
        middle = statistics.median(values)
        place.barh(row, middle, 0.62, color=BLUE if name in panel.ours else "#a9b8c9")
        if len(values) > 1:
            place.plot(values, [row] * len(values), "o", color="black", markersize=2.5)
        text = panel.texts.get(name, short(middle))
        place.text(max(values), row, f"  {text}", va="center", fontsize=8)
    place.set_yticks(range(len(panel.values)), [*panel.values])
    place.invert_yaxis()
    place.set_xlim(0, 1.45 * max(max(values) for values in panel.values.values()) or 1)
    if panel.mark is not None:
        place.axvline(panel.mark, color="#b03030", linewidth=1, linestyle="--")


def _draw_lines(place: Any, panel: Lines) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for number, (name, points) in enumerate(panel.curves.items()):
        x, y = [point[0] for point in points], [point[1] for point in points]
        width = max(1.2, 3.6 - 0.8 * number)  # curves on each other stay visible
        colour = (BLUE, *COLOURS)[number % (1 + len(COLOURS))]
        place.plot(x, y, "o-", color=colour, markersize=1 + width, linewidth=width, label=name)
    if panel.log:
        place.set_xscale("log")
        ticks = sorted({x for points in panel.curves.values() for x, _ in points})
        ticks = ticks[:: 1 + len(ticks) // 8]
        place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        place.set_xticks([], minor=True)
    if "y" in panel.log:
        place.set_yscale("log")
        place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        place.yaxis.set_minor_locator(NullLocator())
        place.yaxis.set_major_formatter("{x:g}")
    else:
        place.set(xlim=(0, None), ylim=(0, None))
    if not panel.log:
        place.xaxis.get_major_locator().set_params(integer=True)
    if panel.mark is not None:
        place.axhline(panel.mark, color="#b03030", linewidth=1, linestyle="--")
    place.set_xlabel(panel.x, fontsize=8)
    place.set_ylabel(panel.y, fontsize=8)
    place.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    _work(sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2])))
