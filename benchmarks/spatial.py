"""Split images on ranks against a single process, or the overhead of Python alone.

On CPUs both use the same cores, and the single process runs twice: with PyTorch's memory settings,
and with those of `spatialdl.comm.allocator`, as the ranks have. With ``--device`` the single
process uses one accelerator, and each rank its own if there are enough. With ``--silent`` one
process trains on the tile of a rank whose messages are dropped, so that only Python's share of the
time is meaningful; small tiles make it large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spatialdl
from benchmarks.harness import (
    CPU,
    Bars,
    Stopwatch,
    add_device,
    add_numbers,
    alternate,
    describe,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    run_ranks,
    short,
    start,
)
from spatialdl import models
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import backend_for, choose_device_path, device_of
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.store import store_by_mpi
from spatialdl.comm.world import start_world
from spatialdl.layout.layout import nearly_cubic
from spatialdl.layout.placement import Axes
from spatialdl.spatial.checking.network import find_builder
from spatialdl.torch_internals import import_compiler
from spatialdl.training.peak_memory import peak_memory_mb

PLAIN = "plain PyTorch"
MEASURES = {
    "seconds": "time of a step, s",
    "cpu_seconds": "CPU seconds of a step",
    "memory_mb": "peak memory of a rank, MB",
}
WARM_UP, CLASSES = 1, 10
CONVOLUTIONS = "convolutions"
"""A network of this benchmark only, see `convolutions`."""
OVER_LIMIT = 75
"""Exit code of a rank that exceeded its memory limit."""
NO_MESSAGES = "none"
"""``--ddp`` without averaging gradients."""


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    runs = alternate(_sides(options), options.rounds)
    values = {
        side: {
            "seconds": [statistics.median(run["seconds"]) for run in found],
            "cpu_seconds": [run["cpu_seconds"] for run in found],
            "memory_mb": [run["memory_mb"] for run in found],
        }
        for side, found in runs.items()
    }
    *others, last = values
    result = {
        **origin("spatial", arguments, runs[last][0]["device"]),
        "options": vars(options),
        "sides": values,
        "ratio": {
            side: {key: median_ratio(values[last][key], values[side][key]) for key in MEASURES}
            for side in others
        },
    }
    kind = "silent" if options.silent else "ranks"
    name = f"spatial-{name_of(options.model)}-{options.size}-{options.ranks}{kind}"
    publish(result, table(result), _panels(result), Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("spatial", __doc__)
    models = (
        f"function of spatialdl.models, {CONVOLUTIONS}, or package.module.function or "
        "file.py:function with an argument num_classes (%(default)s)"
    )
    parser.add_argument("--model", default="resnet18", help=models)
    add_numbers(
        parser,
        size=(1024, 1, "side of the image"),
        batch=(1, 1, "images per step"),
        ranks=(2, 1, "tiles of the image"),
        threads=(2, 1, "total threads"),
        steps=(4, 1, "timed steps per run"),
        rounds=(4, 1, "runs per side"),
    )
    parser.add_argument(
        "--plain-ranks", action="store_true", help="also run ranks with PyTorch's memory settings"
    )
    ddp = f"also run DDP on the ranks, over these backends, or {NO_MESSAGES} (auto)"
    parser.add_argument("--ddp", nargs="*", metavar="BACKEND", help=ddp)
    silent = "one process with the tile of a rank and no messages; --size is the side of the tile"
    parser.add_argument("--silent", action="store_true", help=silent)
    add_device(parser)
    options = parser.parse_args(arguments)
    if options.ddp is not None and options.batch % options.ranks:
        parser.error(f"--ddp: batch {options.batch} cannot be shared by {options.ranks} ranks")
    if options.threads % options.ranks and options.ranks <= options.threads:
        parser.error(f"--threads {options.threads} cannot be shared by {options.ranks} ranks")
    return options


def _sides(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """What runs each side."""
    ranks, grid = options.ranks, nearly_cubic(options.ranks, dims_of(options.model))
    if options.silent:
        silent = training(options, grid=grid, silent=True)
        return {
            PLAIN: partial(run_ranks, "spatial", training(options)),
            f"tile of {ranks}, no messages": partial(run_ranks, "spatial", silent),
        }
    alone, cores = training(options), options.threads
    each, tiles = max(1, cores // ranks), training(options, grid=grid)
    sides = {PLAIN: partial(run_ranks, "spatial", alone, threads=cores, plain=True)}
    if device_of(options.device).type == "cpu":
        sides["one process"] = partial(run_ranks, "spatial", alone, threads=cores)
    for backend in () if options.ddp is None else options.ddp or ("auto",):
        how = {"auto": "", NO_MESSAGES: " without messages"}.get(backend, f" by {backend}")
        name = f"DDP{how}, {ranks} ranks"
        ddp = training(options, ddp=backend)
        sides[name] = partial(run_ranks, "spatial", ddp, ranks, threads=each, plain=True)
    if options.plain_ranks:
        name = f"{ranks} plain ranks"
        sides[name] = partial(run_ranks, "spatial", tiles, ranks, threads=each, plain=True)
    return {**sides, f"{ranks} ranks": partial(run_ranks, "spatial", tiles, ranks, threads=each)}


def table(result: dict[str, Any]) -> list[str]:
    """Table of the medians by side."""
    sides, ratios = result["sides"], result["ratio"]
    rows = []
    for measure, title in MEASURES.items():
        medians = (short(statistics.median(side[measure])) for side in sides.values())
        rows.append([title, *medians, *(f"{ratio[measure]:.2f}" for ratio in ratios.values())])
    speeds = (f"{1 / ratio['seconds']:.2f} of {side}" for side, ratio in ratios.items())
    where = ", on the same cores" if result["device"] == CPU else ""
    columns = ["", *sides, *(f"/ {side}" for side in ratios)]
    last = list(sides)[-1]
    return [*markdown(columns, rows), "", f"speed of {last}: {', '.join(speeds)}{where}"]


def _panels(result: dict[str, Any]) -> list[Bars]:
    last = list(result["sides"])[-1]
    return [
        Bars(title, {name: side[measure] for name, side in result["sides"].items()}, ours=[last])
        for measure, title in MEASURES.items()
    ]


# --- ranks


def training(options: argparse.Namespace, **changes: object) -> argparse.Namespace:
    """Options of `work`: those of a plain process with the given changes.

    Args:
        options: with ``model, size, batch, steps, device``.
        changes: ``grid`` of tiles; ``silent``; ``ddp``, a backend; ``recompute`` blocks; ``limit``
            in MB above the imports.
    """
    found = {name: getattr(options, name) for name in ("model", "size", "batch", "steps", "device")}
    plain = {"grid": None, "silent": False, "ddp": None, "recompute": False, "limit": None}
    return argparse.Namespace(**found, **{**plain, **changes})


def work(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train in one process or on ranks: times, and the peak memory of the largest rank.

    Memory is that of the accelerator, or the resident set minus that of the imports.
    """
    import_compiler()  # optimizers import it; counts as imports, not training
    device = device_of(options.device)
    mesh = _mesh(options)
    comm = start_world() if mesh is None or options.silent else mesh.comm
    if options.ddp:
        start_ddp(options.ddp, comm, device)
        options.batch //= comm.size
    baseline = peak_memory_mb(device)
    if options.limit is not None:
        Thread(target=_watch, args=(device, baseline + options.limit), daemon=True).start()
    with _abort_without_memory():
        found = measure(options, mesh, comm, device)
    found["memory_mb"] = peak_memory_mb(device) - baseline
    ranks = comm.gather(found)
    if options.ddp:
        dist.destroy_process_group()
    if ranks is None:
        return None
    return {
        "seconds": [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)],
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "memory_mb": max(rank["memory_mb"] for rank in ranks),
        "device": describe(device),
    }


def _mesh(options: argparse.Namespace) -> Mesh | None:
    if options.grid is None:
        return None
    grid = tuple(options.grid)
    if not options.silent:
        return spatialdl.init_mesh(grid, check=False)
    peers = Dry(0, torch.Size(grid).numel())
    return Mesh(Axes(spatial=grid), 0, 0, peers, peers)


def measure(
    options: argparse.Namespace, mesh: Mesh | None, comm: Communicator, device: torch.device
) -> dict[str, Any]:
    """Train `steps` steps after a warm-up; with the same images and weights on all sides."""
    model = _network(options, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = _images(options, mesh, device), _labels(options, mesh, device)
    seconds, cpu, watch = [], 0.0, Stopwatch(device)
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            cpu = time.process_time()
        comm.barrier()
        watch.start()
        optimizer.zero_grad()
        with model.no_sync() if options.ddp == NO_MESSAGES else nullcontext():  # type: ignore[operator]
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        if mesh is not None and not options.silent:
            spatialdl.average_gradients(model, mesh)
        optimizer.step()
        seconds.append(watch.stop())
    cpu_seconds = (time.process_time() - cpu) / options.steps
    return {"seconds": seconds[WARM_UP:], "cpu_seconds": cpu_seconds}


def _network(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    name = options.model
    if name == CONVOLUTIONS:
        model = convolutions(CLASSES)
    else:
        model = (find_builder(name) if "." in name else getattr(models, name))(num_classes=CLASSES)
    if options.recompute:
        spatialdl.recompute_blocks(model)
    model.to(device)
    return DistributedDataParallel(model) if options.ddp else model


def start_ddp(name: str, comm: Communicator, device: torch.device) -> None:
    """Start a process group for DDP; auto: NCCL or its equivalent on accelerators, gloo on CPUs.

    Ranks that share devices use the mpi4py backend, as NCCL does not support them.
    """
    import_module("spatialdl.comm.backend")  # registers the backend
    path = choose_device_path(comm, device)
    if name in ("auto", NO_MESSAGES):
        by_path = "gloo" if path is None else backend_for(device) if path.name == "nccl" else None
        name = by_path or "mpi4py"
    store = store_by_mpi(comm)  # type: ignore[arg-type]
    dist.init_process_group(name, store=store, rank=comm.rank, world_size=comm.size)


def _images(options: argparse.Namespace, mesh: Mesh | None, device: torch.device) -> Tensor:
    """Create the images; a rank computes its own box only."""
    size = _size(options)
    at = [
        torch.arange(start, stop).view(-1, *(1,) * (len(size) - 1 - dim))
        for dim, (start, stop) in enumerate(_own(size, mesh))
    ]
    slow, fast = sum(0.05 * n for n in at), sum(0.3 * n for n in at)
    picture = torch.sin(fast + 0.4 * at[0]) + torch.cos(slow - 0.16 * at[-1])
    channels = {"unet3d": 1, CONVOLUTIONS: 64}.get(options.model, 3)
    images = picture.expand(options.batch, channels, *picture.shape).contiguous().to(device)
    return spatialdl.from_local(images, mesh, size) if mesh else images


def _labels(options: argparse.Namespace, mesh: Mesh | None, device: torch.device) -> Tensor:
    """One class per image; for a U-Net, one per pixel of this rank's box."""
    labels = torch.arange(options.batch, device=device) % CLASSES
    if options.model not in ("unet", "unet3d"):
        return labels
    size = _size(options)
    own = [stop - start for start, stop in _own(size, mesh)]
    masks = labels.view(-1, *(1,) * len(own)).repeat(1, *own)
    return spatialdl.from_local(masks, mesh, size) if mesh else masks


def _size(options: argparse.Namespace) -> tuple[int, ...]:
    """Size of the image; `size` is that of a tile without messages."""
    grid = options.grid if options.silent else (1,) * dims_of(options.model)
    return tuple(options.size * parts for parts in grid)


def _own(size: tuple[int, ...], mesh: Mesh | None) -> list[tuple[int, int]]:
    """Start and stop of this rank's box in each spatial dim."""
    if mesh is None:
        return [(0, n) for n in size]
    bounds = mesh.box(size)
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def name_of(model: str) -> str:
    """The last word of ``package.module.function`` or ``file.py:function``."""
    return model.replace(":", ".").rpartition(".")[2]


def dims_of(model: str) -> int:
    """Number of spatial dims of the images of a network."""
    return 3 if model == "unet3d" else 2


def convolutions(num_classes: int) -> nn.Module:
    """Stack of eight 3 x 3 convolutions with 64 channels, the fifth with stride 2.

    Compares convolutions of tiles with halos against padded copies.
    """
    strides = (1, 1, 1, 1, 2, 1, 1, 1)
    layers = (nn.Conv2d(64, 64, 3, stride, 1, bias=False) for stride in strides)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def _watch(device: torch.device, most: float) -> None:
    """Exit when the process exceeds `most` MB."""
    while peak_memory_mb(device) <= most:
        Event().wait(0.05)
    _end_over_limit()


@contextmanager
def _abort_without_memory() -> Iterator[None]:
    """Abort the job if the device is out of memory, as beyond the limit."""
    try:
        yield
    except torch.OutOfMemoryError:
        _end_over_limit()


def _end_over_limit() -> None:
    os.write(1, b"over limit\n")
    os._exit(OVER_LIMIT)


if __name__ == "__main__":
    start(main)
