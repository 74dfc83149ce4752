"""Runs processes and ranks that measure something and print the result."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spatialdl.comm import allocator


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
