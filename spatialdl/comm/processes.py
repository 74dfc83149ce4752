"""The processes of all ranks, as those on one machine see each other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
