"""Runs that the command itself hands to Slurm."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cluster.slurm import ONE, TRAIN, Job, answer, run, steps
from tests.training.checkpoints.runs import checkpoints, losses

TWO_NODES = ["launcher=slurm", "launcher.nodes=2", "launcher.tasks_per_node=1"]
LONG = [*ONE, "parallel=sp"]
STEPS = 120


def submitted(cwd: Path, *words: str) -> list[Submitted]:
    done = run([*TRAIN, *words], cwd)
    assert done.returncode == 0, done.stderr
    (file,) = cwd.rglob("jobs.csv")
    with file.open(newline="") as lines:
        return [Submitted(row, done.stdout) for row in csv.DictReader(lines)]


class Submitted(Job):
    """A job that a command has handed in, with its row of the table."""

    def __init__(self, row: dict[str, str], table: str) -> None:
        self.id, self.log = row["job"], Path(row["log"])
        self.run_dir, self.overrides = Path(row["run directory"]), row["overrides"]
        assert self.id in table

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


def test_a_sweep_on_two_nodes_equals_runs_in_one_process(losses_alone, tmp_path):
    layout = ["parallel=sp", "parallel.grid=[2,1]"]
    jobs = submitted(tmp_path, "-m", *TWO_NODES, *ONE, *layout, "seed=3,4")
    assert len({job.run_dir for job in jobs}) == len(jobs) == 2
    for seed, job in zip((3, 4), jobs, strict=True):
        with job:
            job.ends()
        assert (job.told("NumNodes"), job.told("NumTasks")) == ("2", "2")
        assert job.summary()["world_size"] == 2
        alone = losses_alone(*ONE, f"seed={seed}")
        assert job.summary()["loss"] == pytest.approx(alone, rel=1e-10)
        config = (job.run_dir / ".hydra" / "config.yaml").read_text()
        assert f"seed: {seed}" in config
        assert f"start 1 of the run in {job.run_dir}" in job.said()


@pytest.mark.slow
def test_a_run_whose_time_is_over_goes_on_to_the_same_curve(tmp_path):
    # the same run twice, one after the other
    words = [*LONG, f"trainer.max_steps={STEPS}", "trainer.checkpoint.keep=1,2"]
    jobs = submitted(tmp_path, "-m", "launcher=slurm", "launcher.at_once=1", *words)
    undisturbed, job = jobs
    assert job.told("JobId") == job.id.partition("_")[0]  # a number that means both
    with undisturbed, job:
        job.until(job.said)
        undisturbed.ends()
        job.says("step 1 of")
        answer("scancel", "--full", "--signal=USR1", job.id)  # to ranks, srun and the script
        job.says("start 2 of the run")
        job.ends()
    assert (undisturbed.told("Restarts"), job.told("Restarts")) == ("0", "1")
    assert job.said().count("stopped by SIGUSR1") == 1
    assert "resuming after step" in job.said()
    assert losses(job.run_dir) == losses(undisturbed.run_dir)
    assert steps(job.run_dir) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_real_time_limit_is_gone_past_as_often_as_is_allowed(tmp_path):
    limit = ["launcher.time=2", "launcher.signal=30", "launcher.requeue=1"]
    words = [*LONG, "trainer.max_steps=1000000", "hydra.run.dir=run"]
    (job,) = submitted(tmp_path, "launcher=slurm", *limit, *words)
    with job:
        job.says("start 2 of the run")
        job.says("resuming after step")
        job.says("not requeued: launcher.requeue=1 reached; resume with ckpt_path=latest")
        job.ends("FAILED")
    assert len(checkpoints(job.run_dir)) == 2


def test_a_partition_that_is_not_there_is_told_as_sbatch_does(tmp_path):
    words = ["launcher=slurm", "launcher.partition=gup", "parallel=dp", "seed=0,1"]
    done = run([*TRAIN, "-m", *words], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: sbatch rejected the job: sbatch: error: invalid partition"
    )
    assert list(tmp_path.rglob("*.csv")) == []
