"""What another user of this machine can open, asked in the middle of a run.

python tests/private.py FOLDER      as root: prints what nobody can open there
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


def openable(folder: Path) -> Iterator[str]:
    """All below a folder that this user can read, write or connect to, with how."""
    for path in sorted(folder.iterdir()):
        for how, flag in (("reads", os.O_RDONLY), ("writes", os.O_WRONLY)):
            try:
                os.close(os.open(path, flag | os.O_NONBLOCK | os.O_NOFOLLOW))
            except OSError:
                continue
            yield f"{how} {path}"
        if path.is_dir() and not path.is_symlink():
            if os.access(path, os.W_OK):
                yield f"writes into {path}"
            if os.access(path, os.R_OK | os.X_OK):
                yield from openable(path)
        elif path.is_socket() and _answers(path):
            yield f"connects to {path}"


def _answers(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as to:
            if to.connect_ex(str(path)) == 0:
                return True
    return False


def shared_memory() -> Iterator[str]:
    """Files of memory that this process has mapped and that others can open."""
    for path in set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text())):
        if os.path.exists(path) and os.stat(path).st_mode & 0o077:
            yield f"shares {path}"


def reachable() -> Iterator[str]:
    """Where this process and those that it has started listen, for other machines."""
    from tests.comm.ports import listening
    from tests.comm.running import below

    for pid in (os.getpid(), *below(os.getpid())):
        for found in listening(pid):
            if not ipaddress.ip_address(found.split()[0]).is_loopback:
                yield f"listens at {found}"


def looking(num_classes: int = 3, in_channels: int = 3, out: str = ""):
    """A small network; when it is first called each rank notes what nobody can open."""
    from torch import nn

    from tests.training.checkpoints.runs import network

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = not out

        def forward(self, x):
            if not (self.seen or x.is_meta) and os.path.isdir(out):
                self.seen = True
                words = [sys.executable, __file__, os.environ["TMPDIR"]]
                said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                there = [str(path) for path in Path(os.environ["TMPDIR"]).rglob("*")]
                lines = [*said.splitlines(), *shared_memory(), *reachable(), "", *there]
                Path(out, str(os.getpid())).write_text("\n".join(lines))
            return x

    return nn.Sequential(Looks(), *network(num_classes, in_channels))


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print("\n".join(openable(Path(sys.argv[1]))))
