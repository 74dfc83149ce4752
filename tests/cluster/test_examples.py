"""The scripts of examples/slurm, queued as a user does it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT, SP_PP, Job, answer, run, steps
from tests.inference.predicting.runs import NETWORK, train, write_slide
from tests.training.checkpoints.runs import checkpoints, losses, table

SLURM = ROOT / "examples" / "slurm"
THREE = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1"]
STEPS = 120


def training(cwd: Path, *options: str, steps: int = STEPS) -> Job:
    words = [str(SLURM / "train.sbatch"), "run", *SP_PP, f"trainer.max_steps={steps}"]
    return Job(cwd, *THREE, *options, *words)


@pytest.mark.parametrize(
    ("command", "signal"),
    [
        ("scancel --signal=USR1", "SIGUSR1"),  # what --signal=USR1@120 sends
        pytest.param("scontrol requeue", "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_goes_on_to_the_same_curve(command, signal, uninterrupted, tmp_path):
    """Told of its time limit, or requeued from outside."""
    with training(tmp_path) as job:
        job.says("step 1 of")
        answer(*command.split(), job.id)
        job.says("resuming after step")
        job.ends(restarts=1)
        assert job.said().count(f"stopped by {signal}") == 1
    assert losses(tmp_path / "run") == uninterrupted(STEPS)
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))
    assert not (tmp_path / "run" / "stopped.json").exists()


@pytest.mark.slow
def test_a_cancelled_run_leaves_a_checkpoint_and_does_not_come_back(tmp_path):
    with training(tmp_path, steps=1_000_000) as job:
        job.says("step 1 of")
        answer("scancel", job.id)
        job.ends("CANCELLED", restarts=0)
    marker = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert marker["signal"] == "SIGTERM"
    assert [marker["step"]] == [marker["checkpoint"]] == checkpoints(tmp_path / "run")
    assert steps(tmp_path / "run") == list(range(1, marker["step"] + 1))


@pytest.mark.slow
def test_a_run_that_fails_is_not_queued_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stopped.json").write_text('{"signal": "SIGUSR1"}')  # of an earlier start
    with Job(tmp_path, *THREE, str(SLURM / "train.sbatch"), "run", "parallel=dp") as job:
        job.ends("FAILED", restarts=0)
        assert "parallel=dp needs data 2 x rows 1 x columns 1 = 2 ranks" in job.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["train.sbatch", "run", *SP_PP],
        ["tile.sbatch", "slides", "tiles"],
        ["predict.sbatch", "run", "predicted"],
    ],
    ids=lambda words: words[0],
)
def test_a_job_whose_ranks_srun_cannot_start_fails(words, tmp_path):
    with Job(tmp_path, *THREE, "--hold", str(SLURM / words[0]), *words[1:]) as job:
        # what a node leaves behind that fails: the first step of the job does not start there
        spool = re.search(r"SlurmdSpoolDir *= (.*)", answer("scontrol", "show", "config"))[1]
        if not Path(spool.replace("%n", "node1")).is_dir():
            pytest.skip("the nodes' own folders cannot be seen from here")
        for number in range(1, 5):
            (Path(spool.replace("%n", f"node{number}")) / f"pmix.{job.id}.0").mkdir()
        answer("scontrol", "release", job.id)
        job.ends("FAILED")
        assert "aborted before step completely launched" in job.said()
        assert "srun exited with 0, but" in job.said()


def slides_of(data: Path) -> dict[str, str]:
    """Slides, and the sums over the shards, of a data set."""
    manifest = json.loads((data / "manifest.json").read_text())
    return {
        "slides": sorted({sample["slide"] for sample in manifest["samples"]}),
        "sums": [shard["sha256"] for shard in manifest["shards"]],
    }


@pytest.fixture
def slides(tmp_path):
    folder = tmp_path / "slides"
    folder.mkdir()
    for number in range(5):
        write_slide(folder / f"slide {number}.tif", 200 + 30 * number, 260, seed=number)
    return folder


@pytest.mark.slow
def test_tiling_on_nodes_writes_the_bytes_of_one_process(slides, tmp_path):
    options = ["--tile-size", "64", "--level", "0"]
    with Job(tmp_path, *THREE, str(SLURM / "tile.sbatch"), "slides", "tiles", *options) as job:
        job.ends()
    done = run(["spatialdl-tile", "slides", "--out", "one", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert slides_of(tmp_path / "tiles") == slides_of(tmp_path / "one")


@pytest.mark.slow
def test_tiling_goes_on_after_its_time_limit(slides, tmp_path):
    for number in range(12):
        write_slide(slides / f"large {number}.tif", 1500, 1400, seed=number)
    words = ["slides", "tiles", "--tile-size", "64", "--level", "0"]
    with Job(tmp_path, *THREE, str(SLURM / "tile.sbatch"), *words) as job:
        job.until(lambda: list(tmp_path.glob(".tiles*")))
        answer("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@120 sends
        job.until(lambda: job.told("Restarts") == "1")
        job.ends()
    assert len(slides_of(tmp_path / "tiles")["slides"]) == 17


PREDICTED = [
    *("trained", "predicted", "slides=[slides]", "tile_size=64", "level=0", "min_tissue=0.4"),
    *("maps=false", "device=cpu", "trust=[tests]"),
]


@pytest.mark.slow
def test_predicting_goes_on_after_its_time_limit(slides, tmp_path):
    train(tmp_path / "trained", *NETWORK)
    for count in range(20):
        write_slide(slides / f"large {count}.tif", 1500, 1400, seed=count)
    words = [str(SLURM / "predict.sbatch"), *PREDICTED, "parallel=sp", "parallel.grid=[3,1]"]
    with Job(tmp_path, *THREE, *words) as job:
        job.until(lambda: list(tmp_path.glob("predicted/records/*")))
        answer("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@120 sends
        job.until(lambda: job.told("Restarts") == "1")
        job.ends()
    assert "is already predicted" in job.said()
    alone = [*PREDICTED[2:], "ckpt_path=trained", "hydra.run.dir=one"]
    done = run([sys.executable, "-m", "spatialdl.predict", *alone], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("predictions.csv", "slides.csv"):
        ours, plain = (table(tmp_path / folder / name) for folder in ("predicted", "one"))
        assert len(ours) == len(plain)
        for row, other in zip(ours, plain, strict=True):
            assert {key: number(value) for key, value in row.items()} == {
                key: number(value) for key, value in other.items()
            }
    assert len(plain) == 25


def number(text: str) -> object:
    try:
        return pytest.approx(float(text), abs=1e-9)
    except ValueError:
        return text
