"""Lightning on ranks that mpiexec, srun or torchrun started."""

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
    """A module of Lightning: ``pytorch.strategies`` is ``lightning.pytorch.strategies``.

    Of the package ``pytorch_lightning``, if that is what the program has imported, or all that is
    installed.

    Raises:
        ImportError: if there is neither.
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
    """Ranks as their launcher, and then MPI, numbers them; nothing is started, no port opened."""

    def __init__(self) -> None:
        self._info = launched() or LaunchInfo(0, 1, 0, "no launcher")
        self._local_rank, self._node_rank = self._info.local_rank, 0

    def meet(self, world: Communicator) -> None:
        """Find out which ranks are on one machine; all of them must call it."""
        nodes = world.nodes()
        own = nodes[world.rank]
        self._local_rank = nodes[: world.rank].count(own)
        self._node_rank = sorted(set(nodes)).index(own)

    @property
    def launcher(self) -> str:
        """What started this process, for messages."""
        return self._info.launcher

    @property
    def creates_processes_externally(self) -> bool:
        """So Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Of torchrun; nothing else meets at an address."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """As `main_address`."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Whether a launcher started this process."""
        return launched() is not None

    def world_size(self) -> int:
        """The number of ranks."""
        return self._info.size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has decided."""

    def global_rank(self) -> int:
        """This process, from 0."""
        return self._info.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has decided."""

    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """The number of its machine."""
        return self._node_rank


class StartedProcesses(_Launcher):
    """Runs `fit` and its like in this process, and notes that an error has ended it.

    Attributes:
        failed: whether other ranks may do something else from now on: to wait for them, as
            callbacks would to save a last checkpoint, could last for ever.
    """

    failed = False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may use it."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kw: Any
    ) -> Any:
        """Run it."""
        self.failed = False
        try:
            return function(*args, **kw)
        except BaseException:
            self.failed = True
            raise

    def kill(self, signum: Any) -> None:
        """Nothing: the launcher signals every rank."""


def device_for(local_rank: int, given: list[torch.device]) -> torch.device:
    """The device of a rank, current from now on; called before MPI starts, which looks for it.

    Args:
        local_rank: of the launcher.
        given: what Lightning made of ``accelerator=`` and ``devices=``.

    Raises:
        ValueError: if there are several devices, and none for this rank.
    """
    if given[0].type == "cpu" or given[0].type != current_device().type:
        return given[0]
    visible = torch.accelerator.device_count()
    places = [device.index or 0 for device in given]
    if len(places) == 1 and places[0] == 0:  # a device for each process, as launchers count
        places = list(range(visible))
    if local_rank >= len(places) > 1:
        raise ValueError(
            f"rank {local_rank} of this machine has no device: Lightning has {len(places)} "
            f"({', '.join(map(str, places))}) there: start at most as many ranks on a machine"
        )
    take_device(places[local_rank % len(places)])
    return current_device()


def check_devices(given: list[torch.device], nodes: int, size: int, launcher: str) -> None:
    """Compare ``devices=`` and ``num_nodes=`` with the ranks that there are.

    ``devices=1`` and all devices of a machine may be what ``devices="auto"`` has found, and say
    nothing.

    Raises:
        ValueError: if they ask for another number.
    """
    count = len(given)
    is_auto = count == 1 or (given[0].type != "cpu" and count == torch.accelerator.device_count())
    if size % nodes if is_auto else count * nodes != size:
        devices = "" if is_auto else f"devices={count}, "
        asked = f"a multiple of {nodes}" if is_auto else f"{count} x {nodes} = {count * nodes}"
        raise ValueError(
            f"Trainer({devices}num_nodes={nodes}) asks for {asked} processes, but {launcher} "
            f"started {size}: leave devices and num_nodes out, ranks are those of mpiexec -n or "
            "srun -n"
        )


def agree_on_random_numbers(mesh: Mesh, device: torch.device) -> None:
    """Give all ranks of a replica the random generators of its first one; all must call it.

    They shuffle, augment and drop alike from then on, whether or not the program has set a seed.
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
