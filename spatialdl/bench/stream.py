"""Streamed training steps on images larger than memory, against whole images.

Each step of a ResNet-18 runs in a subprocess with a memory limit set in the kernel or, with
``--device``, in PyTorch's allocator; there the second of two steps is measured. The ideal is the
same step on the whole image without a limit, alternately in the same run, or extrapolated by pixels
if it exceeds the memory of the machine. The largest image that trains within the limit without
streaming is found by bisection.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from spatialdl.bench.device import add_device, describe
from spatialdl.bench.memory import STEP, search
from spatialdl.bench.results import (
    CPU,
    heading,
    kept,
    markdown,
    origin,
    parser_of,
    publish,
    words_of,
)
from spatialdl.bench.stream_picture import draw
from spatialdl.comm.allocator import available_memory
from spatialdl.comm.device_path import device_of
from spatialdl.planning.worker import environment, run_worker

SHARE = 0.8
"""Share of the machine's free memory up to which the ideal is measured."""
BYTES_PER_PIXEL = 500
"""Memory of a step of a ResNet-18 on a whole image, slightly more than measured."""
ALIKE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative tolerance of losses."""
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    rows = _measure(options)
    complete(rows)
    result = {
        **origin("stream", words_of(options)),
        "device": describe(device_of(options.device)),
        "options": vars(options),
        "rows": rows,
        "largest": _largest(options, rows),
    }
    publish(result, table, draw, Path(options.out) / f"stream-{options.limit_gb:g}gb")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("stream", __doc__)
    shown = "(%(default)s)"
    sizes = [2048, 4096, 8192, 16384]
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=sizes, help=f"sides of the images {shown}"
    )
    parser.add_argument("--limit-gb", type=float, default=2.0, help=f"limit of a process {shown}")
    parser.add_argument("--live-gb", type=float, default=0.6, help=f"limit of tensors {shown}")
    parser.add_argument("--tile", type=int, default=2048, help=f"largest side of a tile {shown}")
    parser.add_argument(
        "--small-from",
        type=int,
        default=16384,
        help=f"smallest size in bfloat16 with a recomputed stem {shown}",
    )
    text = "where to offload tensors: host, disk or a folder (host; on CPUs disk)"
    parser.add_argument("--store", help=text)
    add_device(parser)
    parser.add_argument("--threads", type=int, default=1, help=f"threads {shown}")
    parser.add_argument("--rounds", type=int, default=1, help=f"steps per case {shown}")
    parser.add_argument(
        "--folder", default="outputs/bench/stream", help=f"folder of finished steps {shown}"
    )
    options = parser.parse_args(arguments)
    numbers = (options.tile, options.threads, options.rounds, *options.sizes)
    if min(numbers) < 1:
        raise ValueError("sizes, tile, threads and rounds must be at least 1")
    if not 0 < options.live_gb < options.limit_gb:
        raise ValueError(
            f"--live-gb {options.live_gb} must be above 0 and below --limit-gb {options.limit_gb}"
        )
    options.sizes = sorted(set(options.sizes))
    return options


# --- steps


def precision_of(options: argparse.Namespace, size: int) -> str:
    return "bfloat16" if size >= options.small_from else "float32"


def grid_of(options: argparse.Namespace, size: int) -> int:
    return -(-size // int(options.tile))


def _measure(options: argparse.Namespace) -> list[Row]:
    """Rows by size and precision; bfloat16 also at the largest size whose ideal fits."""
    sides = [(size, precision_of(options, size)) for size in options.sizes]
    if any(precision == "bfloat16" for _, precision in sides):
        measured = [size for size in options.sizes if _fits_whole(options, size)]
        sides += [(size, "bfloat16") for size in measured[-1:]]
    sides = sorted(set(sides), key=lambda side: (side[1] != "float32", side[0]))
    rows: list[Row] = [
        {"size": size, "precision": precision, "grid": grid_of(options, size), "runs": []}
        for size, precision in sides
    ]
    with tqdm(total=len(rows) * options.rounds, desc="steps", unit="step") as bar:
        for number in range(options.rounds):
            for row in rows:
                bar.set_postfix_str(f"{row['size']}x{row['size']}, {row['precision']}")
                row["runs"].append(_pair(options, row, number))
                bar.update()
    return rows


def _pair(options: argparse.Namespace, row: Row, number: int) -> dict[str, Any]:
    """Run the streamed step and the ideal, in sequence."""
    size, precision = row["size"], row["precision"]
    pair = {"streamed": _streamed(options, size, precision, number)}
    pair["limited"] = _step(options, size, precision, _within(options), 0)
    if pair["streamed"]["fits"] and _fits_whole(options, size):
        pair["ideal"] = _step(options, size, precision, [], number)
        check_alike(size, precision, *(pair[side]["loss"] for side in ("streamed", "ideal")))
    return pair


def check_alike(size: int, precision: str, streamed: float, ideal: float) -> None:
    """Check that the losses of a streamed and a whole step agree."""
    if not abs(streamed - ideal) <= ALIKE[precision] * abs(ideal):
        raise RuntimeError(
            f"the loss of {size}x{size} in {precision} is {streamed} streamed, but {ideal} whole"
        )


def _streamed(
    options: argparse.Namespace, size: int, precision: str, number: int
) -> dict[str, Any]:
    words = [
        *("--grid", str(grid_of(options, size)), "--live-gb", str(options.live_gb)),
        *([] if options.store is None else ["--store", options.store]),
        *_within(options),
    ]
    return _step(options, size, precision, words, number)


def _within(options: argparse.Namespace) -> list[str]:
    return ["--limit-gb", str(options.limit_gb)]


def _step(
    options: argparse.Namespace, size: int, precision: str, words: Sequence[str], number: int
) -> dict[str, Any]:
    words = ["--size", str(size), "--precision", precision, "--device", options.device, *words]
    if precision == "bfloat16":
        words.append("--recompute-stem")
    way = "streamed" if "--grid" in words else "limited" if "--limit-gb" in words else "ideal"
    path = Path(options.folder) / f"{way}-{size}-{precision}-{number}.json"
    command = [sys.executable, "-m", "spatialdl.bench.stream_worker", *words]
    return kept(path, words, lambda: run_worker(command, environment(options.threads)))


def _fits_whole(options: argparse.Namespace, size: int) -> bool:
    """Whether a step on the whole image fits into memory of the machine or its device."""
    device = device_of(options.device)
    if device.type == "cpu":
        free = available_memory()
    else:
        free = torch.get_device_module(device).mem_get_info()[0]
    return size**2 * BYTES_PER_PIXEL < SHARE * free


def _largest(options: argparse.Namespace, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The largest image within the limit, whole and streamed, by precision."""
    found = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        alike = [row for row in rows if row["precision"] == precision]
        whole, runs = _largest_whole(options, precision, alike)
        fit = [row["size"] for row in alike if row["fits"]]
        refused = [size for size, memory in runs.items() if memory is None]
        found.append(
            {
                "precision": precision,
                "whole": whole,
                "refused": min(refused, default=None),
                "streamed": max(fit, default=0),
            }
        )
    return found


def _largest_whole(
    options: argparse.Namespace, precision: str, rows: Sequence[Row]
) -> tuple[int, dict[int, float | None]]:
    """Side of the largest image without streaming, and memory of all sizes tried.

    Args:
        rows: measured steps of this precision, whose sizes bound the search.
    """
    runs: dict[int, float | None] = {}

    def measure(size: int) -> float | None:
        found = _step(options, size, precision, _within(options), 0)
        runs[size] = found["needed_gb"] if found["fits"] else None
        return runs[size]

    sizes = [row["size"] for row in rows if row["size"] % STEP == 0]
    known = {size: measure(size) is not None for size in sizes}  # these steps are finished
    fits = max((size for size in known if known[size]), default=0)
    too_large = min((size for size in known if not known[size]), default=None)
    return search(measure, options.limit_gb, max(*options.sizes, STEP), fits, too_large), runs


# --- report


def complete(rows: Sequence[Row]) -> None:
    """Add medians and the ideal to the rows: measured, or extrapolated by pixels."""
    for row in rows:
        runs = [run["streamed"] for run in row["runs"]]
        row["fits"] = all(run["fits"] for run in runs)
        if row["fits"]:
            names = [name for name, value in runs[0].items() if isinstance(value, float)]
            row |= {name: median(run[name] for run in runs) for name in names}
        ideals = [run["ideal"] for run in row["runs"] if "ideal" in run]
        row["fits_whole"] = all(run["limited"]["fits"] for run in row["runs"])
        row["is_measured"] = bool(ideals)
        if ideals:
            row["ideal"] = {
                name: median(one[name] for one in ideals)
                for name in ("seconds", "cpu_seconds", "resident_gb")
            }
    for row in rows:
        known = [one for one in rows if one["is_measured"] and one["precision"] == row["precision"]]
        if known and not row["is_measured"]:
            most = max(known, key=lambda one: int(one["size"]))
            pixels = (row["size"] / most["size"]) ** 2
            row["ideal"] = {name: value * pixels for name, value in most["ideal"].items()}


TITLES = (
    *(
        "image",
        "tiles",
        "s",
        "ideal, s",
        "s / ideal",
        "CPU s",
        "ideal, CPU s",
        "CPU / ideal",
        "written, GB",
    ),
    *("read, GB", "stored, GB", "resident, GB", "tensors, GB", "ideal: resident, GB"),
    "not streamed, within the limit",
)


def table(result: dict[str, Any]) -> str:
    """Tables with a line per size, and of the largest images."""
    options, largest = result["options"], result["largest"]
    rows = [_cells(row) for row in result["rows"]]
    limit = f"{options['limit_gb']:g} GB"
    base = result["rows"][0]["runs"][0]["streamed"]
    within = (
        f"limit of {limit} of private memory per process, of which imports take "
        f"{base['base_data_gb']:.2f} GB; resident memory includes shared libraries, "
        f"{base['base_gb']:.2f} GB at the start"
    )
    if result["device"] != CPU:
        within = f"limit of {limit} of device memory per process, which *resident* counts"
    about = (
        f"ResNet-18, one training step, {options['threads']} thread(s); {within}; ~ extrapolated "
        "by pixels; *bf16*: autocast, with a recomputed stem"
    )
    return "\n".join(
        [
            *heading(result),
            about,
            "",
            *markdown(TITLES, rows),
            "",
            *markdown(
                [
                    f"largest image within {limit}",
                    "whole",
                    "refused",
                    "streamed",
                    "times the pixels",
                ],
                [_largest_cells(one) for one in largest],
            ),
        ]
    )


def _largest_cells(found: dict[str, Any]) -> list[str]:
    whole, streamed = found["whole"], found["streamed"]
    times = f"{(streamed / whole) ** 2:.0f} or more" if whole else ""
    refused = "" if found["refused"] is None else str(found["refused"])
    return [found["precision"], str(whole), refused, str(streamed), times]


def _cells(row: Row) -> list[str]:
    name = f"{row['size']}{', *bf16*' if row['precision'] == 'bfloat16' else ''}"
    tiles = f"{row['grid']} x {row['grid']}"
    whole = "fits" if row["fits_whole"] else "does not fit"
    if not row["fits"]:
        return [name, tiles, "does not fit", *("",) * (len(TITLES) - 4), whole]
    ideal, about = row.get("ideal"), "" if row["is_measured"] else "~"
    cells = [name, tiles]
    for key in ("seconds", "cpu_seconds"):
        cells.append(f"{row[key]:.1f}")
        cells += [f"{about}{ideal[key]:.1f}", f"{row[key] / ideal[key]:.2f}"] if ideal else ["", ""]
    for key in ("written_gb", "read_gb", "stored_gb", "resident_gb", "live_gb"):
        cells.append(f"{row[key]:.2f}")
    return [*cells, f"{about}{ideal['resident_gb']:.1f}" if ideal else "", whole]
