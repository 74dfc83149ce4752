from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.comm.ports import listening

JOB = Path(__file__).with_name("ports.py")
LAUNCHERS = ("prterun", "mpiexec", "hydra_pmi_proxy")
"""Open MPI's listens for its own daemons on other machines, whatever it is told."""


def test_listening_sockets_are_found():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::", 0), family=socket.AF_INET6) as other,
        socket.create_connection(one.getsockname()),
    ):
        expected = {f"127.0.0.1 {one.getsockname()[1]}", f":: {other.getsockname()[1]}"}
        assert expected <= listening(os.getpid())
    assert not expected & listening(os.getpid())


@pytest.mark.parametrize("way", ["mpi", "torch", "mpi4py"])
def test_nobody_else_can_reach_the_ranks(way):
    """PyTorch's store, gloo and Open MPI would answer whoever asks, on all networks."""
    done = subprocess.run(
        [*mpiexec_command(2), sys.executable, str(JOB), way, str(os.getpid())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("LOOKED") == 2
    found = [line.split() for line in lines if line.startswith("LISTENS")]
    ranks = [words for words in found if words[1] not in LAUNCHERS]
    assert [words for words in ranks if not ipaddress.ip_address(words[2]).is_loopback] == []
    assert bool(ranks) == (way != "mpi")  # the store of the others, and gloo
