"""Running a process that measures something."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spatialdl import allocator


def environment(threads: int) -> dict[str, str]:
    """What ranks that the command starts find: memory and threads."""
    cores = {"OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**os.environ, **allocator.environment(), **cores}


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a process prints.

    Raises:
        RuntimeError: if it fails.
    """
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def run_json(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The last line that a process prints, which is JSON."""
    found: dict[str, Any] = json.loads(run(command, environment).strip().splitlines()[-1])
    return found
