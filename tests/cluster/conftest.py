"""Where Slurm has four idle nodes these tests run, elsewhere they are skipped."""

from __future__ import annotations

import shutil
import subprocess

import pytest

NODES = 4


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("no Slurm on the path: make test-cluster starts one")
    asked = ["sinfo", "-h", "-N", "-o", "%T"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    up = [state for state in told.stdout.split() if state in ("idle", "allocated", "completing")]
    if len(up) < NODES:
        said = (told.stdout + told.stderr).split()
        pytest.skip(f"these tests take {NODES} nodes, sinfo says {' '.join(said)}")


@pytest.fixture
def nodectl() -> str:
    found = shutil.which("nodectl")
    if found is None:
        pytest.skip("nodes are cut off by nodectl, which is not here")
    return found
