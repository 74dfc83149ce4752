"""All training benchmarks on the accelerators of this machine, with one file of tables.

Spatial parallelism against one device and DDP, halo exchanges against hand-written ones, pipelines,
memory, the training command, and all-reduces. The suite continues after a failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from spatialdl.bench import backend, halo, memory, pipeline, spatial, synthetic
from spatialdl.bench.device import add_device
from spatialdl.bench.results import parser_of
from spatialdl.comm.device_group import backend_for
from spatialdl.comm.device_path import device_of
from spatialdl.parallel.layout import nearly_cubic

Bench = Callable[[Sequence[str]], None]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    out = Path(options.out)
    tables, failed = [], []
    for name, (bench, words) in runs(options).items():
        print(f"\n## {name}\n", flush=True)
        try:
            bench([*words, "--out", str(out / name)])
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", flush=True)
            failed.append(f"{name} ({str(error).partition(chr(10))[0]})")
            continue
        newest = max((out / name).glob("*.md"), key=lambda file: file.stat().st_mtime_ns)
        tables.append(f"## {name}\n\n{newest.read_text()}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "suite.md").write_text("\n".join(tables))
    print(f"\nall tables: {out / 'suite.md'}")
    if failed:
        raise RuntimeError(f"{len(failed)} failed: {', '.join(failed)}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("suite", __doc__)
    add_device(parser)
    parser.set_defaults(device="auto")
    parser.add_argument("--ranks", type=int, help="ranks (devices of this machine, at least 2)")
    parser.add_argument("--limit", type=float, default=8000, help="MB per rank (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test with tiny sizes")
    options = parser.parse_args(arguments)
    if options.device == "auto" and device_of("auto").type == "cpu":
        raise ValueError("PyTorch has no accelerator here: use --device cpu to measure the CPU")
    if options.ranks is not None and options.ranks < 1:
        raise ValueError("--ranks must be at least 1")
    options.ranks = options.ranks or max(2, _devices(options.device))
    return options


def _devices(name: str) -> int:
    return 1 if device_of(name).type == "cpu" else torch.accelerator.device_count()


def runs(options: argparse.Namespace) -> dict[str, tuple[Bench, list[str]]]:
    """The benchmarks and their arguments; some need several ranks."""
    ranks = options.ranks
    device, many = ["--device", options.device], ["--ranks", str(ranks)]
    grid = nearly_cubic(ranks)
    found: dict[str, tuple[Bench, list[str]]] = {
        "spatial": (spatial.main, [*device, *many, "--threads", many[1], *_spatial(options)]),
        "memory": (memory.main, [*device, "--ranks", *sorted({"1", many[1]}), *_memory(options)]),
        "synthetic": (synthetic.main, _synthetic(options, grid)),
    }
    if ranks > 1:
        rows, cols = map(str, grid)
        found["halo"] = (halo.main, [*device, "--grid", rows, cols, *_halo(options)])
        found["pipeline"] = (pipeline.main, [*device, *many, *_pipeline(options)])
    why_not = _lacks_backend(options)
    if why_not:
        print(f"backend skipped: {why_not}", flush=True)
    else:
        found["backend"] = (backend.main, [*device, *many, *_backend(options)])
    return found


def _lacks_backend(options: argparse.Namespace) -> str:
    """Why no other backend of torch.distributed can be compared; otherwise empty."""
    device = device_of(options.device)
    if options.ranks == 1:
        return "it needs several ranks"
    if device.type != "cpu" and backend_for(device) is None:
        return f"PyTorch has no backend for {device.type} here"
    if device.type != "cpu" and options.ranks > _devices(options.device):
        return "several ranks share a device, which NCCL does not support"
    return ""


def _spatial(options: argparse.Namespace) -> list[str]:
    """A batch of one image per rank, so that DDP can be compared."""
    words = f"--batch {options.ranks} --ddp"
    if options.quick:
        return f"{words} --model resnet18 --size 64 --steps 2 --rounds 1".split()
    return f"{words} --model resnet50 --size 1024 --steps 10 --rounds 3".split()


def _memory(options: argparse.Namespace) -> list[str]:
    if options.quick:
        return ["--limit", "150", "--size", "64", "--largest", "64"]
    return f"--limit {options.limit}".split()


def _synthetic(options: argparse.Namespace, grid: Sequence[int]) -> list[str]:
    """One device, and tiles of the same images on all devices."""
    rows, cols = grid
    shared = -(-options.ranks // _devices(options.device))
    grids = "[1,1]" if options.ranks == 1 else f"[1,1],[{rows},{cols}]"
    words = f"parallel=sp parallel.grid={grids} device={options.device} data.batch_size=4"
    words += f" comm.ranks_per_device={shared}"
    if options.quick:
        return f"{words} model=resnet18 data.image_size=[64,64] --rounds 2 --steps 1".split()
    return f"{words} model=resnet50 data.image_size=[1024,1024] --rounds 5 --steps 10".split()


def _halo(options: argparse.Namespace) -> list[str]:
    return (
        ["--channels", "4", "--side", "16", "--rounds", "3", "--exchanges", "2"]
        if options.quick
        else []
    )


def _pipeline(options: argparse.Namespace) -> list[str]:
    return ["--size", "64", "--microbatches", "2", "--rounds", "2"] if options.quick else []


def _backend(options: argparse.Namespace) -> list[str]:
    if options.quick:
        return ["--most", "1024", "--rounds", "2", "--steps", "2", "--model", "resnet18"]
    return ["--side", "224", "--batch", "32"]
