"""Measures this machine: computation of its cores, communication between ranks, and base memory.

The result is cached in the user's cache directory as cluster ``this_machine``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from tqdm import tqdm

from spatialdl.comm import allocator
from spatialdl.comm.allocator import MAPPED_FROM
from spatialdl.comm.capacity import usable_cores
from spatialdl.comm.launch import mpiexec_command
from spatialdl.common.files import replacing

TINY = ("model=resnet18", "model.width=2", "data.image_size=[64,64]", "data.batch_size=4")
TINY_RUN = (
    "data.samples=8",
    "data.validation_samples=0",
    "trainer.max_steps=2",
    "device=cpu",
    "trainer.checkpoint.keep=0",
)
FITTED = ("conv", "conv_input", "conv_strided_input", "conv_weight")
DISK_BLOCK, DISK_BLOCKS = 16 * 2**20, 16
"""Bytes per write, and number of writes."""

WORKER = (sys.executable, "-m", "spatialdl.planning.calibrate_worker")


def cache_file() -> Path:
    """Path of the cached measurements of this machine."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "spatialdl" / "this_machine.json"


def measured() -> dict[str, Any] | None:
    """Cached measurements as settings of a cluster; None without any."""
    try:
        settings: dict[str, Any] = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return None
    return settings


def calibrate() -> dict[str, Any]:
    """Measure this machine and cache the result; takes one to two minutes."""
    cores = usable_cores()
    ranks = max(2, cores)
    results = run_worker([*mpiexec_command(ranks), *WORKER], environment(1), show=True)
    with tqdm(["none", "dp"], desc="memory", leave=False) as layouts:
        base_alone, base = (_base_mb(layout) for layout in layouts)
    link = _link(results["exchange"])
    settings = {
        "name": "this_machine",
        "memory_gb": _memory_gb(),
        "ranks_per_node": 2**20,
        "cores": cores,
        "rates": rates_of(results["busy"]),
        "rates_alone": rates_of(results["alone"]),
        "lone_speed": _ratio(results["busy"], results["lone"]),
        "base_mb": base,
        "base_mb_alone": base_alone,
        "within_node": link,
        "between_nodes": link,
        "reduce": _link(results["all_reduce"]),
        "disk_bytes_per_second": _disk_speed(),
    }
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:  # atomically, as concurrent commands may read it
        out.write(f"{json.dumps(settings, indent=2)}\n".encode())
    return settings


def rates_of(operations: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Rates of all kinds, from (kind, flops, bytes, seconds) of operations of several sizes."""
    kinds: dict[str, list[tuple[float, float, float]]] = {}
    for kind, flops, size, seconds in operations:
        kinds.setdefault(kind, []).append((flops, size, seconds))
    rates = {}
    for kind, rows in kinds.items():
        table = np.array(rows)
        if kind in FITTED:
            rates[kind] = _fitted(*table.T)
        elif kind == "matmul":
            flops, _, seconds = table[-1]
            rates[kind] = {"flops_per_second": flops / seconds, "bytes_per_second": 1e12}
        else:
            rates[kind] = {"bytes_per_second": _curve(table)}
    return rates


def _curve(table: npt.NDArray[np.float64]) -> list[list[float]]:
    """Pairs (bytes, bytes per second); operations of similar size are averaged."""
    groups: list[list[tuple[float, float]]] = []
    for _, size, seconds in sorted(table.tolist(), key=lambda row: row[1]):
        if groups and size < 2 * groups[-1][0][0]:
            groups[-1].append((size, seconds))
        else:
            groups.append([(size, seconds)])
    return [
        [
            math.exp(statistics.fmean(math.log(size) for size, _ in group)),
            statistics.fmean(size / seconds for size, seconds in group),
        ]
        for group in groups
    ]


def _fitted(
    flops: npt.NDArray[np.float64],
    size: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
) -> dict[str, Any]:
    """Fit seconds as a sum of three non-negative parts, with the smallest relative errors.

    Bytes cost more in results so large that their memory is mapped anew.
    """
    large = size >= MAPPED_FROM
    columns = np.stack([np.ones_like(size), flops, size * ~large, size * large], axis=1)
    parts, _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
    fixed, per_flop, per_small, per_large = (float(part) for part in parts)
    return {
        "seconds": fixed,
        "flops_per_second": 1 / per_flop if per_flop else None,
        "bytes_per_second": [
            [MAPPED_FROM / 2, 1 / max(per_small, 1e-13)],
            [2 * MAPPED_FROM, 1 / max(per_large, 1e-13)],
        ],
    }


def _ratio(slower: Sequence[Sequence[Any]], faster: Sequence[Sequence[Any]]) -> float:
    """Median speedup of operations, in logarithms; at least 1."""
    logs = [math.log(a[3] / b[3]) for a, b in zip(slower, faster, strict=True)]
    return max(1.0, math.exp(statistics.median(logs)))


def _link(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Latency of the smallest and bandwidth of the largest of (bytes, seconds), ascending."""
    size, seconds = pairs[-1]
    return {"seconds": pairs[0][1], "bytes_per_second": size / max(seconds - pairs[0][1], 1e-9)}


def _disk_speed() -> float:
    """Bandwidth of the disk for temporary files: written and synced, then read."""
    block = os.urandom(DISK_BLOCK)
    with tempfile.TemporaryFile() as file:
        start = time.perf_counter()
        for number in range(DISK_BLOCKS):
            os.pwrite(file.fileno(), block, number * DISK_BLOCK)
        os.fsync(file.fileno())
        for number in range(DISK_BLOCKS):
            os.pread(file.fileno(), DISK_BLOCK, number * DISK_BLOCK)
        return 2 * DISK_BLOCKS * DISK_BLOCK / (time.perf_counter() - start)


def _base_mb(layout: str) -> float:
    """Peak memory of a rank that trains a tiny network."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*TINY, *TINY_RUN, f"parallel={layout}", f"hydra.run.dir={folder}/run"]
        run([sys.executable, "-m", "spatialdl.train", *overrides], {**os.environ})
        summary: Mapping[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
    return float(max(summary["peak_memory_mb"]))


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def environment(threads: int, plain: bool = False) -> dict[str, str]:
    """Environment of a worker, with the package's memory settings or PyTorch's defaults.

    Args:
        threads: of each rank.
        plain: whether to keep PyTorch's memory settings.
    """
    memory = {allocator.SWITCH: "0"} if plain else allocator.environment()
    cores = {"OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**os.environ, **memory, **cores}


def run(command: Sequence[str], environment: Mapping[str, str], show: bool = False) -> str:
    """Run a process and return its output.

    Args:
        show: whether its standard error, with progress and errors, goes to this process's.

    Raises:
        RuntimeError: if it fails.
    """
    shown = None if show else subprocess.PIPE
    done = subprocess.run(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=shown, text=True, check=False
    )
    if done.returncode:
        output = "see above" if show else f"\n{(done.stderr or done.stdout)[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} failed: {output}")
    return done.stdout


def run_worker(
    command: Sequence[str], environment: Mapping[str, str], show: bool = False
) -> dict[str, Any]:
    """Run a process and parse the JSON on its last line of output; see `run`."""
    result: dict[str, Any] = json.loads(run(command, environment, show).strip().splitlines()[-1])
    return result
