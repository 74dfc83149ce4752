"""Ranks that Slurm and MPI do not introduce to each other."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.slurm import TRAIN, run

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


@pytest.mark.slow
def test_a_program_of_ones_own_is_told_the_same(tmp_path):
    program = "import spatialdl; spatialdl.init_mesh(grid=(2, 1))"
    words = ["srun", "--mpi=none", "-N2", "-n2", sys.executable, "-c", program]
    done = run(words, tmp_path)
    assert done.returncode != 0
    assert ADVICE in done.stderr
