"""Lightning on ranks started by mpiexec, srun or torchrun."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import current_device, take_device
from spatialdl.comm.launch import LaunchInfo, launched
from spatialdl.comm.mesh import Mesh


def lightning_module(name: str) -> Any:
    """Import a module of Lightning: ``pytorch.strategies`` is ``lightning.pytorch.strategies``.

    It is taken from ``pytorch_lightning`` if the program has imported that, or only that is
    installed.

    Raises:
        ImportError: neither package is installed.
    """
    packages = ("lightning.pytorch", "pytorch_lightning")
    here = [package for package in packages if package in sys.modules]
    installed = [package for package in packages if find_spec(package.partition(".")[0])]
    if not installed:
        raise ImportError(
            "spatialdl.integrations.lightning needs Lightning, which is not installed: "
            'pip install "spatialdl[lightning]"'
        )
    part, _, rest = name.partition(".")
    if (here or installed)[0] == packages[0]:
        return import_module(f"lightning.{name}")
    return import_module(
        f"{'pytorch_lightning' if part == 'pytorch' else 'lightning_fabric'}.{rest}"
    )


if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
else:
    ClusterEnvironment = lightning_module("fabric.plugins.environments").ClusterEnvironment
    _Launcher = lightning_module("pytorch.strategies.launchers.launcher")._Launcher


class StartedRanks(ClusterEnvironment):
    """Cluster environment of ranks numbered by their launcher, and then by MPI."""

    def __init__(self) -> None:
        self._info = launched() or LaunchInfo(0, 1, 0, "no launcher")
        self._local_rank, self._node_rank = self._info.local_rank, 0

    def find_nodes(self, world: Communicator) -> None:
        """Find the ranks on each machine; collective over `world`."""
        nodes = world.nodes()
        own = nodes[world.rank]
        self._local_rank = nodes[: world.rank].count(own)
        self._node_rank = sorted(set(nodes)).index(own)

    @property
    def launcher(self) -> str:
        """Name of the launcher, for messages."""
        return self._info.launcher

    @property
    def creates_processes_externally(self) -> bool:
        """True, so Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Address set by torchrun; unused with other launchers."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port set by torchrun; unused with other launchers."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Whether a launcher started this process."""
        return launched() is not None

    def world_size(self) -> int:
        """Number of ranks."""
        return self._info.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher determines the size."""

    def global_rank(self) -> int:
        """Rank of this process."""
        return self._info.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher determines the rank."""

    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """Index of the machine."""
        return self._node_rank


class StartedProcesses(_Launcher):
    """Launcher that runs the Trainer's function in this process, and records failure.

    Attributes:
        failed: whether the function raised. Ranks may then have diverged, so communication, such as
            for a last checkpoint in callbacks, could deadlock.
    """

    failed = False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may use it."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kw: Any
    ) -> Any:
        """Run the function in this process."""
        self.failed = False
        try:
            return function(*args, **kw)
        except BaseException:
            self.failed = True
            raise

    def kill(self, signum: Any) -> None:
        """Do nothing: the launcher signals every rank."""


def device_for(local_rank: int, given: list[torch.device]) -> torch.device:
    """Choose the device of a rank and make it current; call before MPI starts, which uses it.

    Args:
        local_rank: rank on the machine, from the launcher.
        given: Lightning's devices of ``accelerator=`` and ``devices=``.

    Raises:
        ValueError: there are several devices, but fewer than ranks on the machine.
    """
    if given[0].type == "cpu" or given[0].type != current_device().type:
        return given[0]
    visible = torch.accelerator.device_count()
    places = [device.index or 0 for device in given]
    if len(places) == 1 and places[0] == 0:  # one device per process, as launchers count
        places = list(range(visible))
    if local_rank >= len(places) > 1:
        raise ValueError(
            f"rank {local_rank} of this machine has no device: Lightning has {len(places)} "
            f"({', '.join(map(str, places))}): start at most as many ranks per machine"
        )
    take_device(places[local_rank % len(places)])
    return current_device()


def check_devices(given: list[torch.device], nodes: int, size: int, launcher: str) -> None:
    """Check ``devices=`` and ``num_nodes=`` against the number of ranks.

    ``devices=1`` and all devices of a machine are ignored, as they may stem from
    ``devices="auto"``.

    Raises:
        ValueError: the numbers differ.
    """
    count = len(given)
    is_auto = count == 1 or (given[0].type != "cpu" and count == torch.accelerator.device_count())
    if size % nodes if is_auto else count * nodes != size:
        devices = "" if is_auto else f"devices={count}, "
        expected = f"a multiple of {nodes}" if is_auto else f"{count} x {nodes} = {count * nodes}"
        raise ValueError(
            f"Trainer({devices}num_nodes={nodes}) needs {expected} processes, but {launcher} "
            f"started {size}: leave devices and num_nodes out, the number of ranks is that of "
            "mpiexec -n or srun -n"
        )


def agree_on_random_numbers(mesh: Mesh, device: torch.device) -> None:
    """Broadcast random states within each replica; collective over the mesh.

    All ranks of a replica then shuffle, augment and drop out identically, with or without a seed.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    own = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        None if module is None else module.get_rng_state(),
    )
    of_python, of_numpy, of_torch, of_device = mesh.grid_comm.bcast(own)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if module is not None:
        module.set_rng_state(of_device)
