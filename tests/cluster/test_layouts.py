"""Ranks on several nodes against one process, and which of them is where."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster.slurm import ONE, SRUN, TRAIN, quoted, run
from tests.training.checkpoints.runs import losses

SMALL = [
    *("data.image_size=[70,93]", "data.batch_size=4", "data.samples=8"),
    *("data.validation_samples=0", "model.width=8", "device=cpu", "comm.check=true"),
    *("trainer.precision=float64", "trainer.max_steps=2", "trainer.checkpoint.keep=0"),
    "trainer.report=false",
]
SP_PP = [
    *("parallel=sp+pp", "parallel.grid=[[3,2],[1,2]]", "parallel.spatial_stages=2"),
    "parallel.microbatches=4",
]
DP_SP = ["parallel=dp+sp", "parallel.grid=[2,2]", "parallel.data=2", "parallel.microbatches=2"]


@pytest.fixture
def one_process(losses_alone):
    return losses_alone(*SMALL, "parallel.microbatches=4")


def found(done, cwd: Path) -> dict:
    """The summary of a run, in the only run directory that was made."""
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (cwd / "outputs").iterdir()
    assert len((run_dir / "metrics.csv").read_text().splitlines()) == 3
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SP_PP, DP_SP], ids=["sp+pp", "dp+sp"])
def test_two_ranks_on_each_of_four_nodes_equal_one_process(layout, one_process, tmp_path):
    ours = found(run([*SRUN, "-N4", "-n8", *TRAIN, *SMALL, *layout], tmp_path), tmp_path)
    assert ours["world_size"] == 8
    assert ours["loss"] == pytest.approx(one_process, abs=1e-10)


IN_TURN = {
    "dp+sp": """
        rank  host   device  replica  stage   rows  columns
           0  node1  cpu           0  0       0:35     0:93
           2  node1  cpu           0  0      35:70     0:93
           1  node2  cpu           1  0       0:35     0:93
           3  node2  cpu           1  0      35:70     0:93
        """,
    "sp+pp": """
        rank  host   device  replica  stage   rows  columns
           0  node1  cpu           0  0       0:35     0:93
           2  node1  cpu           0  0      35:70     0:93
           1  node2  cpu           0  1       0:70     0:93
        """,
    "sp+pp of five stages": """
        rank  host   device  replica  stage   rows  columns
           0  node1  cpu           0  0       0:35     0:93
           3  node1  cpu           0  0      35:70     0:93
           1  node2  cpu           0  1       0:70     0:93
           4  node2  cpu           0  2       0:70     0:93
           2  node3  cpu           0  3       0:70     0:93
           5  node3  cpu           0  4       0:70     0:93
        """,
}
"""What ``comm.map`` tells of ranks that Slurm has dealt out to nodes in turn."""


def in_turn(name: str, nodes: int, *words: str, slow: bool = True):
    return pytest.param(nodes, words, IN_TURN[name], marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(
    ("nodes", "layout", "expected"),
    [
        in_turn("dp+sp", 2, DP_SP[0], "parallel.grid=[2,1]", *DP_SP[2:], slow=False),
        in_turn("dp+sp", 2, DP_SP[0], "parallel.grid=[2,1]", *DP_SP[2:], "comm.transport=torch"),
        in_turn("sp+pp", 2, "parallel=sp+pp", "parallel.microbatches=4"),
        in_turn(
            *("sp+pp of five stages", 3),
            *("parallel=sp+pp", "parallel.stages=5", "parallel.microbatches=4"),
        ),
    ],
)
def test_grids_lie_within_nodes_and_stages_are_neighbours_however_ranks_are_dealt_out(
    nodes, layout, expected, one_process, tmp_path
):
    table = textwrap.dedent(expected).strip()
    ranks = len(table.splitlines()) - 1
    words = [*SRUN, "-w", f"node[1-{nodes}]", "-m", "cyclic", f"-n{ranks}", *TRAIN, *SMALL, *layout]
    ours = found(run([*words, "comm.map=true"], tmp_path), tmp_path)
    assert ours["loss"] == pytest.approx(one_process, abs=1e-10)
    (log,) = tmp_path.glob("outputs/*/train.log")
    assert f"ranks:\n{table}\n" in log.read_text()


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
    assert ours["loss"] == pytest.approx(one_process, abs=1e-10)


ADVICE = (
    "srun started 2 ranks, but MPI_COMM_WORLD has size 1: srun and this MPI use different PMI "
    "protocols, use `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH"
)


@pytest.mark.parametrize("mpi", ["none", pytest.param("pmi2", marks=pytest.mark.slow)])
def test_worlds_of_one_end_with_advice_before_there_is_a_run_directory(mpi, tmp_path):
    words = ["srun", f"--mpi={mpi}", "-N2", "-n2", *TRAIN, "parallel=dp", "trainer.max_steps=1"]
    done = run(words, tmp_path)
    assert done.returncode != 0
    assert ADVICE in done.stderr
    assert list(tmp_path.iterdir()) == []


SP = [*ONE, "parallel=sp", "parallel.grid=[2,2]", "hydra.run.dir=run"]


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["none", "pmi2"])  # a site's default, which concerns torchrun only
def test_torchrun_under_srun_equals_one_process(mpi, losses_alone, tmp_path):
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=$SLURMD_NODENAME:29400", "--rdzv-id=2"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    line = " ".join([*words, *meeting, "-m", *map(quoted, [*TRAIN[2:], *SP])])
    each = f"srun --mpi={mpi} --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 {line}"
    done = run(["sbatch", "-N2", "-n2", "--wait", "--output=log", "--wrap", each], tmp_path)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 4
    assert losses(tmp_path / "run") == pytest.approx(losses_alone(*ONE), abs=1e-10)
