"""Several hosts without Slurm: mpiexec with an agent in place of ssh, and torchrun on each."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.cluster.alone import losses_alone
from tests.cluster.slurm import ENVIRONMENT, PATIENCE_S, TRAIN, quoted, run
from tests.training.checkpoints.runs import TINY, losses

HOSTS = ["node1", "node2"]
ONE = [*TINY, "data.validation_samples=0", "trainer.report=false"]
SP = [*ONE, "parallel=sp", "parallel.grid=[2,2]", "hydra.run.dir=run"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return losses_alone(tmp_path_factory.mktemp("none"), *ONE)


def assert_is_the_run_of_one_process(cwd: Path, one_process: list[float]) -> None:
    assert json.loads((cwd / "run" / "summary.json").read_text())["world_size"] == 4
    assert losses(cwd / "run") == pytest.approx(one_process, abs=1e-10)


@pytest.mark.slow
def test_mpiexec_on_two_hosts_equals_one_process(agent, one_process, tmp_path):
    mpiexec = mpiexec_command(4)
    hosts = ["--host", ",".join(f"{host}:2" for host in HOSTS)]
    words = [*mpiexec, *hosts, "-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH", *TRAIN, *SP]
    done = run(words, tmp_path, PRTE_MCA_plm_ssh_agent=str(agent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_is_the_run_of_one_process(tmp_path, one_process)


@pytest.mark.slow
def test_torchrun_on_two_hosts_equals_one_process(nodectl, one_process, tmp_path):
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS[0]}:29400", "--rdzv-id=1"]
    words = ["--nnodes=2", "--nproc-per-node=2", *meeting, "-m", *TRAIN[2:], *SP]
    line = shlex.join([sys.executable, "-m", "torch.distributed.run", *words])
    started = [
        subprocess.Popen(
            [nodectl, "exec", host, "/bin/bash", "-c", f"cd {tmp_path} && exec {line}"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in HOSTS
    ]
    try:
        said = [one.communicate(timeout=PATIENCE_S)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0], "\n".join(said)
    assert_is_the_run_of_one_process(tmp_path, one_process)


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["none", "pmi2"])  # a site's default, which concerns torchrun only
def test_torchrun_under_srun_equals_one_process(mpi, one_process, tmp_path):
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=$SLURMD_NODENAME:29400", "--rdzv-id=2"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    line = " ".join([*words, *meeting, "-m", *map(quoted, [*TRAIN[2:], *SP])])
    each = f"srun --mpi={mpi} --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 {line}"
    done = run(["sbatch", "-N2", "-n2", "--wait", "--output=log", "--wrap", each], tmp_path)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert_is_the_run_of_one_process(tmp_path, one_process)
