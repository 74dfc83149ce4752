"""Ranks and nodes that fail in the middle of a run."""

from __future__ import annotations

import re
import shlex

import pytest

from spatialdl.training.run_lock import LockHolder
from tests.cluster.slurm import (
    HANGING,
    NODES,
    ONE,
    ROOT,
    SP_PP,
    SRUN,
    TIMEOUT,
    TRAIN,
    Job,
    assert_hang_is_told,
    quoted,
    resume_drained,
    run,
    steps,
    until,
)
from tests.comm.running import with_failing
from tests.training.checkpoints.runs import losses

TRAIN_SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
ON_THREE = [*SRUN, "-w", ",".join(NODES), "-n3", *TRAIN]
OFTEN = "trainer.checkpoint.every_steps=10"
STEPS = 500


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"rank 1 on node2: Traceback.*?\nZeroDivisionError: this rank has had en"),
        pytest.param("dies", r"error: node2: task 1: Killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named(how, said, assert_gone, tmp_path):
    done = run([*ON_THREE, *SP_PP, *with_failing(how), "hydra.run.dir=run"], tmp_path)
    assert done.returncode != 0
    assert_gone(NODES, f"model.how={how}")
    assert len(re.findall(said, done.stderr, re.DOTALL)) == 1, done.stderr


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    words = [*TRAIN, *ONE, "hydra.run.dir=run", "parallel=dp"]
    longer = [*words, "trainer.max_steps=1000000"]
    with Job(tmp_path, "-N2", "-n2", "--wrap", " ".join([*SRUN, *map(quoted, longer)])) as job:
        job.says("step 1 of")
        done = run([*SRUN, "-N2", "-n2", *words], tmp_path)
        assert done.returncode != 0
        told = re.search(
            r"another run is writing to (.*) \((.*), process \d+ on node\d\)", done.stderr
        )
        assert told, done.stderr
        assert told.groups() == (str(tmp_path / "run"), f"job {job.id}")
        assert not job.is_over()


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
        job.ends(restarts=1)
    assert losses(run_dir) == uninterrupted(STEPS)
    assert steps(run_dir) == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_start_that_lives_on_where_nobody_sees_it_ends_when_the_next_one_goes_on(lose, tmp_path):
    nodes = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--exclusive"]
    model = ["model._target_=tests.cluster.networks.waiting", f"++model.file={tmp_path / 'go'}"]
    words = [*ONE, *model, "parallel=dp", OFTEN]
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
        job.ends()
    assert steps(tmp_path / "run") == list(range(1, 41))


def test_a_rank_that_stops_is_named_and_the_job_ends(assert_gone, tmp_path):
    done = run([*ON_THREE, *HANGING, *with_failing("stops")], tmp_path)
    assert done.returncode != 0
    assert_hang_is_told(done.stdout + done.stderr, NODES, lost=1)
    assert_gone(NODES, TIMEOUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "remedy", "lost"), [("freeze", "thaw", 1), ("cut", "heal", 2)])
def test_a_rank_on_a_node_that_is_lost_is_named(
    fault, remedy, lost, lose, assert_gone, nodectl, tmp_path
):
    each = shlex.join([*SRUN, *TRAIN, *HANGING])
    with Job(tmp_path, "-N3", "-n3", "--exclusive", "--no-requeue", "--wrap", each) as job:
        job.says("step 1 of")
        nodes = job.nodes()
        lose(nodes[lost], fault, remedy)
        job.says("Aborting the job.")
        until(job.is_over, "the job does not end")
        assert job.told("JobState") in ("FAILED", "NODE_FAIL"), job.said()
        assert_hang_is_told(job.said(), nodes, lost)
    if fault == "freeze":
        run([nodectl, remedy, nodes[lost]], tmp_path)
    # who is cut off has waited for the others, and ended by itself
    assert_gone(nodes, TIMEOUT, patience_s=60)
