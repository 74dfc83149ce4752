"""Nodes and processes of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spatialdl.layout.node_order import numbered

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep, as when a disk or a file system does not respond",
    "Z": "dead",
    "X": "dead",
}


def machine() -> tuple[str, str]:
    """Identifies this machine, also among equal host names; equal in its containers."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return socket.gethostname(), boot


class Nodes:
    """Ranks of a world by node; collective.

    Args:
        world: the ranks.
        names: identifies the machine of each rank; by default queried from the transport.

    Attributes:
        of: node index of each rank, in the order of their first ranks.
    """

    def __init__(self, world: Communicator, names: Sequence[Hashable] | None = None) -> None:
        self._world = world
        self.of = numbered(world.nodes() if names is None else names)

    @cached_property
    def own(self) -> Communicator:
        """Ranks of this rank's node; the first access is collective over them."""
        here = self.of[self._world.rank]
        return self._world.subset([rank for rank, node in enumerate(self.of) if node == here])


class Process(NamedTuple):
    """Process of a rank.

    Attributes:
        started: start time on its kernel's clock; distinguishes reused process ids.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), _status(os.getpid())[1])

    def state(self) -> str | None:
        """Why it does not run, if this machine's kernel reports a reason."""
        if self.host != socket.gethostname():
            return None
        state, started = _status(self.pid)
        return _STATES.get(state) if started == self.started else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _status(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
