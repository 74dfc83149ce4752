"""Where the processes of a job listen, as the kernel says; as a program, a job that says it.

mpiexec -n 2 python tests/comm/ports.py PID|0 mpi|torch|mpi4py ...
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listening(pid: int) -> set[str]:
    """Addresses, with their ports, at which a process listens."""
    owned = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                owned.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and f"socket:[{words[9]}]" in owned:
                    found.add(_address(words[1]))
    return found


def _address(text: str) -> str:
    address, port = text.split(":")
    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    packed = struct.pack(f"={len(words)}I", *words)  # each word as it lies in memory
    return f"{ipaddress.ip_address(packed)} {int(port, 16)}"


def ancestors(pid: int) -> list[int]:
    """A process, its parent, and so on."""
    found = []
    while pid > 1:
        found.append(pid)
        # the second field, a name in parentheses, may have anything in it
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def _main(outermost: int, ways: list[str]) -> None:
    """After each way of talking, where this rank, and its ancestors below a process, listen."""
    import torch
    import torch.distributed as dist

    from spatialdl.comm.groups import start
    from spatialdl.comm.launch import launched
    from spatialdl.comm.world import start_world, torch_world

    world = start_world(ways[0] if ways[0] != "mpi4py" else "mpi")
    for way in ways:
        if way == "torch" and way != ways[0]:
            world = torch_world(launched())
        if way == "mpi4py":
            start("mpi4py")
            dist.all_reduce(torch.ones(3))
        pair = world.subset(range(world.size))
        pair.all_reduce(torch.ones(10**6))
        pair.allgather("all are connected")
        said = f"LOOKED {way} {socket.gethostname()}\n"
        for pid in ancestors(os.getpid()) if outermost else [os.getpid()]:
            if pid == outermost:
                break
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for one in sorted(listening(pid)):
                said += f"LISTENS {way} {socket.gethostname()} {name} {one}\n"
        sys.stdout.write(said)
        sys.stdout.flush()
        pair.barrier()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
