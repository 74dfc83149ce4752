"""Ranks share the verification of files, and all report all damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import RANDOM, stage_file
from spatialdl.training.checkpoints.reading import damages, first_whole
from tests.training.checkpoints.runs import made

WORLD = MpiCommunicator(MPI.COMM_WORLD)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(WORLD.bcast(tmp_path))


def test_all_ranks_hear_of_damage_in_any_file(folder):
    paths = [folder / f"step-{step:08d}" for step in (9, 6, 3)]
    if WORLD.rank == 0:
        for step in (9, 6, 3):
            made(folder, step, stages=4)
    WORLD.barrier()
    assert damages(paths[0], WORLD) == []
    assert first_whole(paths, WORLD) == paths[0]
    names = [RANDOM, *map(stage_file, range(4))]
    for name in names:
        content = (paths[0] / name).read_bytes()
        WORLD.barrier()
        if WORLD.rank == 0:
            (paths[0] / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        WORLD.barrier()
        (said,) = damages(paths[0], WORLD)
        assert said == f"{name} was changed (SHA-256 mismatch)"
        assert first_whole(paths, WORLD) == paths[1]
        WORLD.barrier()
        if WORLD.rank == 0:
            (paths[0] / name).write_bytes(content)
        WORLD.barrier()
    if WORLD.rank == 0:
        for path in paths:
            (path / "checkpoint.json").write_text("{")
    WORLD.barrier()
    with pytest.raises(CheckpointError, match="as are the 2 other checkpoints"):
        first_whole(paths, WORLD)
