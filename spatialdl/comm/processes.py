"""The machines of ranks, and which ranks of a machine share what."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from spatialdl.comm.communicator import Communicator
from spatialdl.parallel.node_order import numbered

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in the kernel, as where a disk or a file system does not answer",
    "Z": "dead",
    "X": "dead",
}


def machine() -> tuple[str, str]:
    """What tells this machine from others, also from those of one name, and from containers."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return socket.gethostname(), boot


class Nodes:
    """The ranks of a world by machine; all of them make it together.

    Args:
        world: the ranks.
        names: identifies the machine of each rank; asked of the transport if not given.

    Attributes:
        of: by rank the number of its node, in the order of their first ranks.
    """

    def __init__(self, world: Communicator, names: Sequence[Hashable] | None = None) -> None:
        self._world = world
        self.of = numbered(world.nodes() if names is None else names)

    @cached_property
    def own(self) -> Communicator:
        """The ranks of this rank's node; all of these ask for the first time together."""
        here = self.of[self._world.rank]
        return self._world.subset([rank for rank, node in enumerate(self.of) if node == here])


class Process(NamedTuple):
    """Of a rank.

    Attributes:
        started: by the clock of its kernel; tells it from a later process of the same number.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), _status(os.getpid())[1])

    def state(self) -> str | None:
        """Why it does nothing, if this machine's kernel knows of it and says so."""
        if self.host != socket.gethostname():
            return None
        state, started = _status(self.pid)
        return _STATES.get(state) if started == self.started else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _status(pid: int) -> tuple[str, str]:
    """State and start of a process; empty where there is none, or no such kernel."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
