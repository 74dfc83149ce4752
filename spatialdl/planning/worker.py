"""Running processes, and ranks, that measure something and print what they found."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spatialdl.comm import allocator


def environment(threads: int, plain: bool = False) -> dict[str, str]:
    """What a worker finds in its environment: memory as the product sets it, or as PyTorch comes.

    Args:
        threads: of each rank.
        plain: leave memory as it is.
    """
    memory = {allocator.SWITCH: "0"} if plain else allocator.environment()
    cores = {"OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**os.environ, **memory, **cores}


def run(command: Sequence[str], environment: Mapping[str, str], show: bool = False) -> str:
    """What a process prints.

    Args:
        show: let it write its progress, and what went wrong, to this process's standard error.

    Raises:
        RuntimeError: if it fails.
    """
    shown = None if show else subprocess.PIPE
    done = subprocess.run(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=shown, text=True, check=False
    )
    if done.returncode:
        said = "see above" if show else f"\n{(done.stderr or done.stdout)[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} failed: {said}")
    return done.stdout


def run_worker(
    command: Sequence[str], environment: Mapping[str, str], show: bool = False
) -> dict[str, Any]:
    """The last line that a process prints, which is JSON; see `run`."""
    found: dict[str, Any] = json.loads(run(command, environment, show).strip().splitlines()[-1])
    return found
