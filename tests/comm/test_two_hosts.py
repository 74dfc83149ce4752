"""Ranks on two hosts without Slurm meet, and listen where the other host is and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from tests.comm.two_hosts import ADDRESSES, Hosts, two_hosts
from tests.training.checkpoints.runs import TINY, losses, train

ROOT = Path(__file__).resolve().parents[2]
NETWORK = ["++model._target_=tests.comm.two_hosts.looking", "trainer.max_steps=3"]
STEPS = [*NETWORK, "data.validation_samples=0"]
TRAIN = ["-m", "spatialdl.train", *TINY, *STEPS, "parallel=sp", "parallel.grid=[1,2]"]

EACH_ITS_OWN = {host: {address} for host, address in ADDRESSES.items()}
OPEN_MPI = ("0.0.0.0 1024", ":: 1024")
"""It listens on all networks where ranks are on several hosts, from its first port upwards."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("alone")
    train(run_dir, *STEPS)
    return losses(run_dir)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as made:
        yield made


def started(hosts: Hosts, host: str, words: list[str], **more: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        hosts.on(host, words),
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes: list[subprocess.Popen[str]]) -> None:
    try:
        said = [one.communicate(timeout=200)[0] for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert not any(one.returncode for one in processes), "\n".join(said)


def addresses(seen: Path, but: Collection[str] = ()) -> dict[str, set[str]]:
    """Where the ranks of each host have listened, but for some ports."""
    found: dict[str, set[str]] = {}
    for path in seen.iterdir():
        lines = [line for line in path.read_text().splitlines() if line not in but]
        found.setdefault(path.name.split()[0], set()).update(line.split()[0] for line in lines)
    return found


def test_ranks_that_mpiexec_starts_meet_at_the_address_of_their_host(hosts, one_process, tmp_path):
    seen, run_dir = tmp_path / "seen", tmp_path / "run"
    seen.mkdir()
    agent = hosts.agent(tmp_path / "agent")
    where = ["--host", "host-a:1,host-b:1", "-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH"]
    words = [*mpiexec_command(2), *where, sys.executable, *TRAIN]
    words += ["comm.transport=torch", f"++model.folder={seen}", f"hydra.run.dir={run_dir}"]
    ended([started(hosts, "host-a", words, PRTE_MCA_plm_ssh_agent=str(agent))])
    assert losses(run_dir) == pytest.approx(one_process, abs=1e-10)
    assert addresses(seen, OPEN_MPI) == EACH_ITS_OWN


@pytest.mark.slow
def test_ranks_that_torchrun_starts_listen_at_the_address_of_their_host(
    hosts, one_process, tmp_path
):
    seen, run_dir = tmp_path / "seen", tmp_path / "run"
    seen.mkdir()
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400", "--rdzv-id=1"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *meeting]
    words = [*agent, *TRAIN, f"++model.folder={seen}", f"hydra.run.dir={run_dir}"]
    ended([started(hosts, host, words) for host in ADDRESSES])
    assert losses(run_dir) == pytest.approx(one_process, abs=1e-10)
    assert addresses(seen) == EACH_ITS_OWN


@pytest.mark.slow
@pytest.mark.parametrize("start", ["mpiexec", "torchrun"])
def test_ranks_on_one_host_that_has_a_network_keep_to_the_loopback(start, hosts, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = agent if start == "torchrun" else [*mpiexec_command(2), sys.executable]
    more = ["comm.transport=torch", f"++model.folder={seen}", f"hydra.run.dir={tmp_path / 'run'}"]
    ended([started(hosts, "host-a", [*words, *TRAIN, *more])])
    assert len(list(seen.iterdir())) == 2
    assert addresses(seen) == {"host-a": {"127.0.0.1"}}
