"""Mean and std over ranks: those of one process, of integers bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.statistics import FILE, statistics_of

WORLD = MPI.COMM_WORLD


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("count", [1, 5])  # fewer than ranks, and an uneven share
def test_ranks_together_find_what_one_does(count, dtype, tmp_path):
    folder = Path(WORLD.bcast(str(tmp_path)))
    if WORLD.rank == 0:
        draw = np.random.default_rng(0)
        with ShardWriter(folder / "set", ["a"], kind="regions") as writer:
            for number in range(count):
                shape = 5 + number, 7, 2
                writer.add(draw.integers(0, 60_000, shape).astype(dtype), 0, "train")
    WORLD.Barrier()
    source = ShardDataset(folder / "set", "train")
    found = statistics_of(source, "train", MpiCommunicator(WORLD))
    assert WORLD.allgather(found) == [found] * WORLD.size
    WORLD.Barrier()
    if WORLD.rank == 0:
        assert (folder / "set" / FILE).is_file()
        (folder / "set" / FILE).unlink()
        assert statistics_of(source, "train", SingleProcess()) == found
