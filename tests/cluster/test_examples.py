"""The scripts of examples/slurm, queued as a user does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT, Job, answer, run
from tests.training.checkpoints.runs import TINY, checkpoints, losses, table

SLURM = ROOT / "examples" / "slurm"
NODES = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1"]
SP_PP = [*TINY, "parallel=sp+pp", "parallel.microbatches=2", "data.validation_samples=0"]
STEPS = 200


def training(cwd: Path, name: str, *options: str, steps: int = STEPS) -> Job:
    words = [str(SLURM / "train.sbatch"), name, *SP_PP, f"trainer.max_steps={steps}"]
    return Job(cwd, *NODES, *options, *words)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("uninterrupted")
    with training(cwd, "run") as job:
        job.until(job.is_over)
        assert job.told("JobState") == "COMPLETED", job.said()
    return cwd / "run"


def steps(run_dir: Path) -> list[int]:
    return [int(row["step"]) for row in table(run_dir / "metrics.csv")]


def assert_is_the_same_run(run_dir: Path, other: Path) -> None:
    assert losses(run_dir) == losses(other)
    assert steps(run_dir) == list(range(1, STEPS + 1))
    assert not (run_dir / "stopped.json").exists()


def test_a_run_that_is_told_of_its_time_limit_goes_on_to_the_same_curve(uninterrupted, tmp_path):
    with training(tmp_path, "run") as job:
        job.says("step 1 of")
        answer("scancel", "--signal=USR1", job.id)  # what --signal=USR1@120 sends
        job.says("going on after step")
        job.until(job.is_over)
        assert job.told("JobState") == "COMPLETED", job.said()
        assert job.told("Restarts") == "1"
        assert job.said().count("stopped by SIGUSR1") == 1
    assert_is_the_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_real_time_limit_sends_the_signal(tmp_path):
    limit = ["--time=2", "--signal=USR1@30"]
    with training(tmp_path, "run", *limit, steps=1_000_000) as job:
        job.says("stopped by SIGUSR1")
        job.says("going on after step")
        assert job.told("Restarts") == "1"


@pytest.mark.slow
def test_a_run_requeued_from_outside_goes_on_to_the_same_curve(uninterrupted, tmp_path):
    with training(tmp_path, "run") as job:
        job.says("step 1 of")
        answer("scontrol", "requeue", job.id)
        job.says("going on after step")
        job.until(job.is_over)
        assert job.told("JobState") == "COMPLETED", job.said()
        assert job.said().count("stopped by SIGTERM") == 1
    assert_is_the_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_cancelled_run_leaves_a_checkpoint_and_does_not_come_back(tmp_path):
    with training(tmp_path, "run", steps=1_000_000) as job:
        job.says("step 1 of")
        answer("scancel", job.id)
        job.until(job.is_over)
        assert job.told("JobState") == "CANCELLED"
        assert job.told("Restarts") == "0"
    marker = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert marker["signal"] == "SIGTERM"
    assert [marker["step"]] == [marker["checkpoint"]] == checkpoints(tmp_path / "run")
    assert steps(tmp_path / "run") == list(range(1, marker["step"] + 1))


def test_a_run_that_fails_is_not_queued_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stopped.json").write_text('{"signal": "SIGUSR1"}')  # of an earlier start
    options = [*NODES, "--wait", f"--output={tmp_path / 'log'}"]
    done = run(["sbatch", *options, str(SLURM / "train.sbatch"), "run", "parallel=dp"], tmp_path)
    assert done.returncode != 0
    assert "parallel=dp needs 2 ranks = 2 replicas x 1x1" in (tmp_path / "log").read_text()
