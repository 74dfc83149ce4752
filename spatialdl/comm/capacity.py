"""Whether the ranks of a layout fit on this machine, checked before they are launched.

More ranks than cores are common in tests and trials, and only slow. Far more of them start for
minutes, answer to no signal meanwhile, and may leave the machine without memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from spatialdl.comm.allocator import available_memory

RANKS_PER_CORE = 8
FEWEST_RANKS = 16
"""Ranks that start even on a machine with one core."""

RANK_BYTES = 500_000_000
"""Memory of a rank before it has any data: Python, PyTorch and MPI."""

_OTHER_MACHINES = (
    *("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"),
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE"),
)
"""Variables with which launchers place ranks on further machines."""


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_one_machine(environment: Mapping[str, str] | None = None) -> bool:
    """Whether mpiexec starts all ranks here: no scheduler and no host file is set.

    Args:
        environment: environment variables; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    return not any(name in environment for name in _OTHER_MACHINES)


def check_capacity(ranks: int, oversubscribe: bool | None = None) -> None:
    """Check that this machine has the cores and the memory for ranks to be launched on it.

    Args:
        ranks: number of ranks.
        oversubscribe: true: any number is accepted; None: the command has no key for that.

    Raises:
        ValueError: if it has not, with the largest number that is launched.
    """
    if oversubscribe or ranks == 1 or not is_one_machine():
        return
    cores, memory = usable_cores(), _memory()
    by_cores = max(RANKS_PER_CORE * cores, FEWEST_RANKS)
    by_memory = by_cores if memory is None else max(1, memory // RANK_BYTES)
    most = min(by_cores, by_memory)
    if ranks <= most:
        return
    of = f"{cores} cores"
    if memory is not None and by_memory <= by_cores:
        of = f"{memory / 1e9:.1f} GB of free memory, of which each takes {RANK_BYTES / 1e9:.1f} GB"
    raise ValueError(
        f"{ranks} ranks are too many for this machine with {of}: use at most {most}, or start "
        "them with mpiexec or srun on more machines"
        + ", or set comm.oversubscribe=true"
        * (oversubscribe is not None)
    )


def _memory() -> int | None:
    """Bytes that programs can still allocate here, also within a container; None if unknown."""
    try:
        free = available_memory()
    except (OSError, StopIteration):  # no Linux
        return None
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return free
