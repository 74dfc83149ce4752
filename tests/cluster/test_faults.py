"""Ranks and nodes that fail in the middle of a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spatialdl.training.run_lock import LockHolder
from tests.cluster import hanging
from tests.cluster.slurm import ROOT, SRUN, TRAIN, Job, quoted, resume_drained, run, until
from tests.comm.running import with_failing as with_stopping
from tests.training.checkpoints.runs import TINY, losses, table

TRAIN_SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
SP_PP = [
    *(*TINY, "parallel=sp+pp", "parallel.microbatches=2", "data.validation_samples=0"),
    "trainer.report=false",
]
THREE = ["node1", "node2", "node3"]
ON_THREE = ["-w", ",".join(THREE), "-n3"]
OFTEN = "trainer.checkpoint.every_steps=10"
STEPS = 500


def with_failing(how: str) -> list[str]:
    model = ["model._target_=tests.cluster.networks.network", f"++model.how={how}"]
    return [*SP_PP, *model, "hydra.run.dir=run"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param(
            "raises", r"rank 1 on node2: Traceback.*?\nRuntimeError: this rank has had en"
        ),
        pytest.param("dies", r"error: node2: task 1: Killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named(how, said, assert_gone, tmp_path):
    done = run([*SRUN, *ON_THREE, *TRAIN, *with_failing(how)], tmp_path)
    assert done.returncode != 0
    assert_gone(THREE, f"model.how={how}")
    assert len(re.findall(said, done.stderr, re.DOTALL)) == 1, done.stderr


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    words = [*TRAIN, *TINY, "data.validation_samples=0", "hydra.run.dir=run"]
    longer = [*words, "parallel=dp", "trainer.max_steps=1000000"]
    with Job(tmp_path, "-N2", "-n2", "--wrap", " ".join([*SRUN, *map(quoted, longer)])) as job:
        job.says("step 1 of")
        done = run([*SRUN, "-N2", "-n2", *words, "parallel=dp"], tmp_path)
        assert done.returncode != 0
        told = re.search(
            r"another run is writing to (.*) \((.*), process \d+ on node\d\)", done.stderr
        )
        assert told, done.stderr
        assert told.groups() == (str(tmp_path / "run"), f"job {job.id}")
        assert not job.is_over()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("uninterrupted")
    layout = ["hydra.run.dir=run", f"trainer.max_steps={STEPS}", OFTEN]
    done = run([*SRUN, "-N3", "-n3", *TRAIN, *SP_PP, *layout], cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "remedy", "number"),  # 0 runs the script and rank 0, too
    [("crash", "boot", 1), ("cut", "heal", 0), ("freeze", "thaw", 0), ("freeze", "thaw", 1)],
)
def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint(
    fault, remedy, number, lose, uninterrupted, tmp_path
):
    nodes = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1", "--exclusive"]
    words = [str(TRAIN_SBATCH), "run", *SP_PP, f"trainer.max_steps={STEPS}", OFTEN]
    run_dir = tmp_path / "run"
    with Job(tmp_path, *nodes, *words) as job:
        job.says("step-00000010")
        lose(job.nodes()[number], fault, remedy)
        job.until(lambda: resume_drained() or job.told("Restarts") == "1")
        job.until(lambda: resume_drained() or job.told("JobState") == "RUNNING")
        if (fault, number) == ("freeze", 0):  # it has the lock, and others give it back
            job.says("has ended for Slurm: continuing without its lock")
        job.says("resuming after step")
        job.until(job.is_over)
        assert job.told("JobState") == "COMPLETED", job.said()
        assert job.told("Restarts") == "1"
    assert losses(run_dir) == losses(uninterrupted)
    assert steps(run_dir) == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_start_that_lives_on_where_nobody_sees_it_ends_when_the_next_one_goes_on(lose, tmp_path):
    nodes = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--exclusive"]
    model = ["model._target_=tests.cluster.networks.waiting", f"++model.file={tmp_path / 'go'}"]
    words = [*TINY, *model, "parallel=dp", "data.validation_samples=0", OFTEN]
    with Job(tmp_path, *nodes, str(TRAIN_SBATCH), "run", *words, "trainer.max_steps=40") as job:
        job.says("step-00000010")
        (node,) = job.nodes()
        earlier = LockHolder.read(tmp_path / "run" / ".lock")
        lose(node, "cut", "heal")
        job.says("resuming after step 10")
        assert job.nodes() != [node]
        assert f"this job was restarted (job {job.id}, process" in job.said()
        assert "did not exit" not in job.said()
        running = run(["nodectl", "exec", node, "ps", "-eo", "pid"], tmp_path).stdout.split()
        assert "1" in running
        assert str(earlier.process) not in running
        (tmp_path / "go").touch()
        job.until(job.is_over)
        assert job.told("JobState") == "COMPLETED", job.said()
    assert steps(tmp_path / "run") == list(range(1, 41))


def steps(run_dir: Path) -> list[int]:
    return [int(row["step"]) for row in table(run_dir / "metrics.csv")]


def test_a_rank_that_stops_is_named_and_the_job_ends(assert_gone, tmp_path):
    done = run(
        [*SRUN, "-w", ",".join(THREE), "-n3", *TRAIN, *hanging.SP_PP, *with_stopping("stops")],
        tmp_path,
    )
    assert done.returncode != 0
    hanging.assert_told(done.stdout + done.stderr, THREE, lost=1)
    assert_gone(THREE, hanging.TIMEOUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "remedy", "lost"), [("freeze", "thaw", 1), ("cut", "heal", 2)])
def test_a_rank_on_a_node_that_is_lost_is_named(
    fault, remedy, lost, lose, assert_gone, nodectl, tmp_path
):
    each = shlex.join([*SRUN, *TRAIN, *hanging.SP_PP])
    with Job(tmp_path, "-N3", "-n3", "--exclusive", "--no-requeue", "--wrap", each) as job:
        job.says("step 1 of")
        nodes = job.nodes()
        lose(nodes[lost], fault, remedy)
        job.says("Aborting the job.")
        until(job.is_over, "the job does not end")
        assert job.told("JobState") in ("FAILED", "NODE_FAIL"), job.said()
        hanging.assert_told(job.said(), nodes, lost)
    if fault == "freeze":
        run([nodectl, remedy, nodes[lost]], tmp_path)
    # who is cut off has waited for the others, and ended by itself
    assert_gone(nodes, hanging.TIMEOUT, patience_s=60)
