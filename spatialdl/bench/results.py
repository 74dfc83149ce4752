"""What the benchmarks share: running workers, and telling what they found."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spatialdl import allocator


def grid_of(ranks: int) -> tuple[int, int]:
    """The grid nearest to a square, with more rows than columns."""
    cols = max(cols for cols in range(1, ranks + 1) if ranks % cols == 0 and cols * cols <= ranks)
    return ranks // cols, cols


def environment(threads: int, plain: bool = False) -> dict[str, str]:
    """What a worker finds in its environment: memory as the product sets it, or as PyTorch comes.

    Args:
        threads: of each rank.
        plain: leave memory as it is.
    """
    memory = {allocator.SWITCH: "0"} if plain else allocator.environment()
    cores = {"OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**os.environ, **memory, **cores}


def run_worker(
    command: list[str], environment: dict[str, str], show: bool = False
) -> dict[str, Any]:
    """What a worker prints as its last line.

    Args:
        show: let it write its progress, and what went wrong, to this process's standard error.

    Raises:
        RuntimeError: if it fails.
    """
    shown = None if show else subprocess.PIPE
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=shown, text=True, check=False
    )
    if done.returncode:
        said = "see above" if show else f"\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} failed: {said}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def publish(
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
    path: Path,
) -> None:
    """Print the table of a result; write it to `path`.json and its picture to `path`.png."""
    print(table(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, path.with_name(f"{path.name}.png"))
    print(f"\nwritten: {path}.json and .png")


def machine() -> str:
    """What the numbers were taken on."""
    return f"{os.cpu_count()} cores, {cpu_model()}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
