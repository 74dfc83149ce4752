"""Two hosts on this machine: namespaces with a name, an address and interfaces of their own.

They are gone with the processes that hold them; nothing of this machine is changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
_KINDS = ("--net", "--uts", "--mount", "--ipc")


class Hosts:
    """Where commands run.

    Args:
        pids: of processes that hold the hosts, by name.
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def on(self, host: str, words: list[str]) -> list[str]:
        """A command that runs another one on a host."""
        line = 'cd "$0" && exec "$@"'  # entering leads to the root folder
        return [*self._enter(host), "sh", "-c", line, os.getcwd(), *words]

    def agent(self, path: Path) -> Path:
        """A program that takes the place of ssh: a host, then words of a line for its shell."""
        lines = ["#!/bin/sh", "host=$1; shift", 'case "$host" in']
        for host in self._pids:
            lines.append(f'{host}) exec {shlex.join(self._enter(host))} sh -c "$*" ;;')
        path.write_text("\n".join([*lines, "esac", "exit 1\n"]))
        path.chmod(0o700)
        return path

    def _enter(self, host: str) -> list[str]:
        return ["nsenter", "--target", str(self._pids[host]), *_KINDS]


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts that are connected; the test is skipped where they cannot be made.

    Args:
        folder: for files of theirs.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        pytest.skip(f"hosts are namespaces, which takes root and {', '.join(_TOOLS)}")
    names = folder / "hosts"
    lines = [f"{address} {host}\n" for host, address in ADDRESSES.items()]
    names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    script = (
        'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo up && read end'
    )
    with ExitStack() as stack:
        pids = {}
        for host in ADDRESSES:
            process = stack.enter_context(
                subprocess.Popen(
                    ["unshare", *_KINDS, "sh", "-c", script, "sh", host, str(names)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            assert process.stdout is not None
            said = process.stdout.readline()
            if said != "up\n":
                pytest.skip(f"no namespaces here: {said}")
            pids[host] = process.pid
        hosts = Hosts(pids)
        a, b = pids.values()
        _run("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "eth0", "netns", b)
        for host, address in ADDRESSES.items():
            _run(*hosts.on(host, ["ip", "address", "add", f"{address}/24", "dev", "eth0"]))
            _run(*hosts.on(host, ["ip", "link", "set", "eth0", "up"]))
        yield hosts


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)
