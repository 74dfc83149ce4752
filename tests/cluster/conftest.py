"""Where Slurm has four idle nodes these tests run, elsewhere they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.cluster.slurm import answer, until

NODES = 4
UP = ("idle", "mixed", "allocated", "completing")


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("no Slurm on the path: make test-cluster starts one")
    asked = ["sinfo", "-h", "-N", "-o", "%T"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    up = [state for state in told.stdout.split() if state in UP]
    if len(up) < NODES:
        said = (told.stdout + told.stderr).split()
        pytest.skip(f"these tests take {NODES} nodes, sinfo says {' '.join(said)}")


@pytest.fixture
def lose() -> Iterator[Callable[[str, str, str], None]]:
    """Take a node away; afterwards it comes back."""
    nodectl = shutil.which("nodectl")
    if nodectl is None:
        pytest.skip("faults of nodes are made by nodectl, which is not here")
    lost = []

    def take(node: str, fault: str, remedy: str) -> None:
        lost.append((remedy, node))
        subprocess.run([nodectl, fault, node], check=True)

    yield take
    for remedy, node in lost:
        subprocess.run([nodectl, remedy, node], check=True)
        until(partial(_is_idle, node), f"{node} does not come back")


def _is_idle(node: str) -> bool:
    # Slurm itself asks a node that was down only now and then
    subprocess.run(
        ["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False
    )
    return answer("sinfo", "-h", "-N", "-n", node, "-o", "%T") == "idle"
