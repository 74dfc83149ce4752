"""Ranks that Slurm and MPI do not introduce to each other."""

from __future__ import annotations

import pytest

from tests.cluster.slurm import TRAIN, run


@pytest.mark.parametrize("mpi", ["none", pytest.param("pmi2", marks=pytest.mark.slow)])
def test_worlds_of_one_end_with_advice_before_there_is_a_run_directory(mpi, tmp_path):
    words = ["srun", f"--mpi={mpi}", "-N2", "-n2", *TRAIN, "parallel=dp", "trainer.max_steps=1"]
    done = run(words, tmp_path)
    assert done.returncode != 0
    assert (
        "srun started 2 ranks, but MPI sees a world of 1: srun and this MPI do not speak the same "
        "protocol, take `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH"
    ) in done.stderr
    assert list(tmp_path.iterdir()) == []
