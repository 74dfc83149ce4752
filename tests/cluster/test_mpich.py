"""PMI-2: an environment with MPICH in place of Open MPI."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.slurm import (
    HANGING,
    NODES,
    ONE,
    SP_PP,
    TIMEOUT,
    TRAIN,
    assert_hang_is_told,
    run,
)
from tests.comm.running import with_failing
from tests.training.checkpoints.runs import losses

pytestmark = pytest.mark.slow
LIBRARY = "import mpi4py.MPI as mpi; print(mpi.Get_library_version())"


@pytest.fixture(scope="module")
def mpich(tmp_path_factory) -> str:
    """The interpreter of an environment with MPICH, and all else that is installed here."""
    folder = tmp_path_factory.mktemp("environment") / "mpich"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    asked = [python, "-m", "pip", "install", "--quiet", "--retries=1", "--timeout=20", "mpich"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
    if told.returncode:
        pytest.skip(f"MPICH cannot be installed here: {told.stderr[-300:]}")
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert "MPICH" in run([python, "-c", LIBRARY], folder).stdout
    return python


def test_ranks_of_mpich_on_three_nodes_equal_one_process(mpich, losses_alone, tmp_path):
    srun = ["srun", "--mpi=pmi2", "-N3", "-n3", "--kill-on-bad-exit=1"]
    done = run([*srun, mpich, *TRAIN[1:], *SP_PP, "hydra.run.dir=run"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 3
    alone = losses_alone(*ONE, SP_PP[-1])
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-10)


def test_a_rank_that_stops_is_named_and_the_job_ends(mpich, assert_gone, tmp_path):
    srun = ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-w", ",".join(NODES), "-n3"]
    done = run([*srun, mpich, *TRAIN[1:], *HANGING, *with_failing("stops")], tmp_path)
    assert done.returncode != 0
    assert_hang_is_told(done.stdout + done.stderr, NODES, lost=1)
    assert_gone(NODES, TIMEOUT)
