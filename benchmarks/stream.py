"""Streamed training steps on images larger than memory, against whole images.

Each step of a ResNet-18 runs in a subprocess with a memory limit set in the kernel (RLIMIT_DATA, of
private writable memory, including imports and thread stacks) or, with ``--device``, in PyTorch's
allocator; there the second of two steps is measured. The ideal is the same step on the whole image
without a limit, alternately in the same run, or extrapolated by pixels if it exceeds the memory of
the machine. The largest image that trains within the limit without streaming is found by bisection.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import spatialdl
from benchmarks.harness import (
    CPU,
    Bars,
    add_device,
    add_numbers,
    cached,
    describe,
    markdown,
    origin,
    parser_of,
    publish,
    run_ranks,
    start,
)
from benchmarks.memory import STEP, search
from spatialdl import models
from spatialdl.comm.allocator import available_memory
from spatialdl.comm.device_path import device_of
from spatialdl.pipeline.streamed import memory_of
from spatialdl.spatial.recompute import recompute_block
from spatialdl.training.peak_memory import peak_memory_mb

SHARE = 0.8
"""Share of the machine's free memory up to which the ideal is measured."""
BYTES_PER_PIXEL = 500
"""Memory of a step of a ResNet-18 on a whole image, slightly more than measured."""
ALIKE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative tolerance of losses."""
STACK = 2 * 2**20
"""Stack size of a thread: the limit counts stacks in full, and the default is 8 MB per tile."""
LACKS_MEMORY = ("memory", "alloc", "create a primitive", "start new thread")
TIMES = ("seconds", "cpu_seconds")
STORED = ("written_gb", "read_gb", "stored_gb", "resident_gb", "live_gb")
TITLES = (
    *("image", "tiles", "s", "ideal, s", "s / ideal", "CPU s", "ideal, CPU s", "CPU / ideal"),
    *("written, GB", "read, GB", "stored, GB", "resident, GB", "tensors, GB"),
    *("ideal: resident, GB", "not streamed, within the limit"),
)
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    rows = _measure(options)
    complete(rows)
    result = {
        **origin("stream", arguments, describe(device_of(options.device))),
        **{"options": vars(options), "rows": rows, "largest": _largest(options, rows)},
    }
    path = Path(options.out) / f"stream-{options.limit_gb:g}gb"
    publish(result, table(result), _panels(result), path)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser, shown = parser_of("stream", __doc__), "(%(default)s)"
    add = parser.add_argument
    add("--limit-gb", type=float, default=2.0, help=f"limit of a process {shown}")
    add("--live-gb", type=float, default=0.6, help=f"limit of tensors {shown}")
    add("--store", help="where to offload tensors: host, disk or a folder (host; on CPUs disk)")
    add("--folder", default="outputs/bench/stream", help=f"folder of finished steps {shown}")
    add_device(parser)
    add_numbers(
        parser,
        sizes=([2048, 4096, 8192, 16384], 1, "sides of the images"),
        tile=(2048, 1, "largest side of a tile"),
        small_from=(16384, 1, "smallest size in bfloat16 with a recomputed stem"),
        threads=(1, 1, "threads"),
        rounds=(1, 1, "steps per case"),
    )
    options = parser.parse_args(arguments)
    if not 0 < options.live_gb < options.limit_gb:
        parser.error(f"--live-gb {options.live_gb} must be above 0, below --limit-gb")
    options.sizes = sorted(set(options.sizes))
    return options


# --- steps


def _measure(options: argparse.Namespace) -> list[Row]:
    """Rows by size and precision; bfloat16 also at the largest size whose ideal fits."""
    sides = {(size >= options.small_from, size) for size in options.sizes}
    if any(small for small, _ in sides):
        measured = [size for size in options.sizes if _fits_whole(options, size)]
        sides |= {(True, size) for size in measured[-1:]}
    rows: list[Row] = [
        {
            **{"size": size, "precision": "bfloat16" if small else "float32", "runs": []},
            "grid": -(-size // options.tile),
        }
        for small, size in sorted(sides)
    ]
    with tqdm(total=len(rows) * options.rounds, desc="steps", unit="step") as bar:
        for number in range(options.rounds):
            for row in rows:
                bar.set_postfix_str(f"{row['size']}x{row['size']}, {row['precision']}")
                row["runs"].append(_round(options, row, number))
                bar.update()
    return rows


def _round(options: argparse.Namespace, row: Row, number: int) -> dict[str, Any]:
    """Run the streamed step, the whole image within the limit, and the ideal."""
    size, precision = row["size"], row["precision"]
    found = {"streamed": _step(options, size, precision, number, row["grid"], True)}
    found["limited"] = _step(options, size, precision, 0, None, True)
    if found["streamed"]["fits"] and _fits_whole(options, size):
        found["ideal"] = _step(options, size, precision, number, None, False)
        check_alike(size, precision, *(found[side]["loss"] for side in ("streamed", "ideal")))
    return found


def check_alike(size: int, precision: str, streamed: float, ideal: float) -> None:
    """Check that the losses of a streamed and a whole step agree."""
    if not abs(streamed - ideal) <= ALIKE[precision] * abs(ideal):
        raise RuntimeError(
            f"the loss of {size}x{size} in {precision} is {streamed} streamed, but {ideal} whole"
        )


def _step(
    options: argparse.Namespace,
    size: int,
    precision: str,
    number: int,
    grid: int | None,
    limited: bool,
) -> dict[str, Any]:
    """A step in a subprocess, cached; streamed over a grid, and within the limit or not."""
    given: dict[str, Any] = {"size": size, "precision": precision, "device": options.device}
    given |= {"grid": grid, "limit_gb": options.limit_gb if limited else None}
    given |= {"live_gb": options.live_gb, "store": options.store} if grid else {}
    kind = "streamed" if grid else "limited" if limited else "ideal"
    path = Path(options.folder) / f"{kind}-{size}-{precision}-{number}.json"
    words, threads = [json.dumps(given)], options.threads
    given_options = argparse.Namespace(**given)
    return cached(path, words, lambda: run_ranks("stream", given_options, threads=threads))


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
        runs: dict[int, float | None] = {}

        def measure(size: int, precision: str = precision, runs: Any = runs) -> float | None:
            one = _step(options, size, precision, 0, None, True)
            runs[size] = one["needed_gb"] if one["fits"] else None
            return runs[size]  # type: ignore[no-any-return]

        sizes = [row["size"] for row in alike if row["size"] % STEP == 0]  # these are finished
        known = {size: measure(size) is not None for size in sizes}
        fits = max((size for size in known if known[size]), default=0)
        too_large = min((size for size in known if not known[size]), default=None)
        largest = search(measure, options.limit_gb, max(*options.sizes, STEP), fits, too_large)
        refused = min((size for size, memory in runs.items() if memory is None), default=None)
        streamed = max((row["size"] for row in alike if row["fits"]), default=0)
        found.append({"precision": precision, "whole": largest, "streamed": streamed})
        found[-1]["refused"] = refused
    return found


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
            names = [*TIMES, "resident_gb"]
            row["ideal"] = {name: median(one[name] for one in ideals) for name in names}
    for row in rows:
        known = [one for one in rows if one["is_measured"] and one["precision"] == row["precision"]]
        if known and not row["is_measured"]:
            most = max(known, key=lambda one: int(one["size"]))
            pixels = (row["size"] / most["size"]) ** 2
            row["ideal"] = {name: value * pixels for name, value in most["ideal"].items()}


def table(result: dict[str, Any]) -> list[str]:
    """Tables with a line per size, and of the largest images."""
    options = result["options"]
    limit, base = f"{options['limit_gb']:g} GB", result["rows"][0]["runs"][0]["streamed"]
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
    titles = [f"largest image within {limit}", "whole", "refused", "streamed", "times the pixels"]
    largest = []
    for one in result["largest"]:
        whole, streamed = one["whole"], one["streamed"]
        times = f"{(streamed / whole) ** 2:.0f} or more" if whole else ""
        largest.append([one["precision"], str(whole), str(one["refused"]), str(streamed), times])
    rows = [_cells(row) for row in result["rows"]]
    return [about, "", *markdown(TITLES, rows), "", *markdown(titles, largest)]


def _cells(row: Row) -> list[str]:
    cells = [f"{row['size']}{', *bf16*' * (row['precision'] == 'bfloat16')}"]
    cells.append(f"{row['grid']} x {row['grid']}")
    whole = "fits" if row["fits_whole"] else "does not fit"
    if not row["fits"]:
        return [*cells, "does not fit", *("",) * (len(TITLES) - 4), whole]
    ideal, about = row.get("ideal"), "" if row["is_measured"] else "~"
    for key in TIMES:
        cells.append(f"{row[key]:.1f}")
        cells += [f"{about}{ideal[key]:.1f}", f"{row[key] / ideal[key]:.2f}"] if ideal else ["", ""]
    cells += [f"{row[key]:.2f}" for key in STORED]
    return [*cells, f"{about}{ideal['resident_gb']:.1f}" if ideal else "", whole]


def _panels(result: dict[str, Any]) -> list[Bars]:
    """Memory with the limit, and CPU seconds; streamed and of the whole image."""
    limit = result["options"]["limit_gb"]
    panels = []
    for key, title, mark in (
        ("resident_gb", f"peak memory, GB; dashed: the limit of {limit:g} GB", limit),
        ("cpu_seconds", "CPU seconds of a training step", None),
    ):
        values = {}
        for row in (row for row in result["rows"] if row["fits"]):
            name = f"{row['size']}, {row['precision']}"
            values[f"{name}, streamed"] = [row[key]]
            if "ideal" in row:
                kind = "whole" if row["is_measured"] else "whole, extrapolated"
                values[f"{name}, {kind}"] = [row["ideal"][key]]
        ours = [name for name in values if name.endswith("streamed")]
        panels.append(Bars(title, values, ours=ours, mark=mark))
    return panels


# --- the step, in a subprocess


class Picture:
    """Square image (1, 3, size, size) of float32 in [0, 1), computed on access."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.shape, self._device = (1, 3, size, size), device

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        places = torch.arange(self.shape[2], device=self._device)
        rows, columns = (places[one].float() for one in part[2:])
        slopes = torch.tensor([0.37, 0.83, 0.59], device=self._device).view(1, 3, 1, 1)
        return (rows.view(-1, 1) * slopes).add(columns * 0.71).frac_()


def work(options: argparse.Namespace) -> None:
    """Print a line of JSON, with a reason if the step does not fit, and exit."""
    device = device_of(options.device)
    if options.limit_gb is not None:
        _limit(device, int(options.limit_gb * 1e9))
    base = {"base_gb": _resident_gb(device), "base_data_gb": _data_gb()}
    try:
        if device.type != "cpu":
            _train(options, device)
            gc.collect()  # frames of the first imports in it refer to its store
        found = _train(options, device)
    except (RuntimeError, MemoryError) as error:
        if options.limit_gb is None or not lacks_memory(error):
            raise
        found = {"fits": False, "why": (str(error) or type(error).__name__).splitlines()[0]}
    print(json.dumps({**base, **found}), flush=True)
    os._exit(0)  # threads without memory cannot be joined


def lacks_memory(error: BaseException) -> bool:
    """Whether an error is out of memory: PyTorch's allocator, oneDNN, Python or a thread stack."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(word in words for word in LACKS_MEMORY)


def _limit(device: torch.device, most: int) -> None:
    """Limit memory to `most` bytes, of this process or of PyTorch's allocator on a device.

    Raises:
        ValueError: the device does not support a limit.
    """
    if device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        raise ValueError(f"memory of {device.type} cannot be limited: remove --limit-gb")
    module.set_per_process_memory_fraction(min(1.0, most / module.mem_get_info()[1]))


def _train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run forward, loss and backward of one step."""
    threading.stack_size(STACK)
    torch.manual_seed(0)
    model: nn.Module = models.resnet18(num_classes=10)
    is_small = options.precision == "bfloat16"
    if is_small:
        layers = list(model.children())
        stem = nn.Sequential(*layers[:4])  # up to the first pooling
        recompute_block(stem)
        model = nn.Sequential(stem, *layers[4:])
    model, image = model.to(device), Picture(options.size, device)
    _wait(device)
    began, cpu = time.perf_counter(), time.process_time()
    with torch.autocast(device.type, torch.bfloat16, enabled=is_small):
        output = _forward(model, image, options)
        loss = F.cross_entropy(output.float(), torch.tensor([1], device=device))
    memory = None if options.grid is None else memory_of(output)
    loss.backward()  # type: ignore[no-untyped-call]
    _wait(device)
    found: dict[str, Any] = {
        **{"fits": True, "seconds": time.perf_counter() - began},
        **{"cpu_seconds": time.process_time() - cpu, "loss": float(loss.detach())},
        **{"resident_gb": _resident_gb(device), "needed_gb": _needed_gb(device)},
    }
    if memory is not None:
        found["live_gb"] = memory.peak / 1e9
        if memory.store is not None:
            store = memory.store
            sizes = {"written": store.written, "read": store.read, "stored": store.peak}
            found |= {f"{name}_gb": size / 1e9 for name, size in sizes.items()}
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _resident_gb(device: torch.device) -> float:
    if device.type == "cpu":
        return peak_memory_mb(device) * 2**20 / 1e9
    return float(torch.get_device_module(device).max_memory_reserved() / 1e9)


def _needed_gb(device: torch.device) -> float:
    """Peak memory without what PyTorch's allocator keeps in its cache, in GB."""
    if device.type == "cpu":
        return _resident_gb(device)
    return float(torch.get_device_module(device).max_memory_allocated() / 1e9)


def _forward(model: nn.Module, image: Picture, options: argparse.Namespace) -> Tensor:
    output: Tensor
    if options.grid is None:
        output = model(image[:, :, :, :])
    else:
        grid, live, store = (options.grid, options.grid), options.live_gb, options.store
        output = spatialdl.stream(model, image, grid, limit_gb=live, store=store)
    return output


def _data_gb() -> float:
    """Memory that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024 / 1e9


if __name__ == "__main__":
    start(main)
