"""Eight ranks on four nodes against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm import SRUN, TRAIN, quoted, run

SMALL = [
    *("data.image_size=[70,93]", "data.batch_size=4", "data.samples=8"),
    *("data.validation_samples=0", "model.width=8", "device=cpu", "comm.check=true"),
    *("trainer.precision=float64", "trainer.max_steps=2", "trainer.checkpoint.keep=0"),
]
SP_PP = [
    *("parallel=sp+pp", "parallel.grid=[[3,2],[1,2]]", "parallel.spatial_stages=2"),
    "parallel.microbatches=4",
]
DP_SP = ["parallel=dp+sp", "parallel.grid=[2,2]", "parallel.data=2", "parallel.microbatches=2"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("none")
    return found(run([*TRAIN, *SMALL, "parallel.microbatches=4"], cwd), cwd)


def found(done, cwd: Path) -> dict:
    """The summary of a run, in the only run directory that was made."""
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (cwd / "outputs").iterdir()
    assert len((run_dir / "metrics.csv").read_text().splitlines()) == 3
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    "layout",
    [pytest.param(SP_PP, id="sp+pp"), pytest.param(DP_SP, id="dp+sp", marks=pytest.mark.slow)],
)
def test_two_ranks_on_each_of_four_nodes_equal_one_process(layout, one_process, tmp_path):
    ours = found(run([*SRUN, "-N4", "-n8", *TRAIN, *SMALL, *layout], tmp_path), tmp_path)
    assert ours["world_size"] == 8
    assert ours["loss"] == pytest.approx(one_process["loss"], abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["salloc", "sbatch"])
def test_inside_an_allocation_the_command_starts_its_ranks_on_the_nodes(how, one_process, tmp_path):
    layout = ["parallel=sp+pp", "parallel.microbatches=4"]
    words = {
        "salloc": ["salloc", "-N3", "-n3", "--quiet"],
        "sbatch": ["sbatch", "-N3", "-n3", "--wait", "--quiet", "--wrap"],
    }[how]
    command = [*TRAIN, *SMALL, *layout]
    if how == "sbatch":
        command = [" ".join(map(quoted, command))]
    ours = found(run([*words, *command], tmp_path), tmp_path)
    assert ours["world_size"] == 3
    assert ours["loss"] == pytest.approx(one_process["loss"], abs=1e-10)
