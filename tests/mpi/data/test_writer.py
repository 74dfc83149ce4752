"""Ranks together: a data set that all write, and mean and std of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.joining import parts_folder
from spatialdl.data.statistics import FILE, statistics_of
from spatialdl.errors import ShardError

WORLD = MPI.COMM_WORLD
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 30, 20, 3), np.uint8)
needs_ranks = pytest.mark.skipif(WORLD.size < 2, reason="needs ranks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(WORLD.bcast(str(tmp_path / "set")))


def own() -> list[int]:
    """Rank 0 has none."""
    return [number for number in range(20) if 1 + number % (WORLD.size - 1) == WORLD.rank]


@needs_ranks
def test_ranks_write_one_data_set(folder: Path) -> None:
    with ShardWriter(folder, ["a"], comm=WORLD, shard_size=5_000) as writer:
        for number in own():
            writer.add(IMAGES[number], label=0, slide=str(number))
    assert writer.path == folder
    data = ShardDataset(folder)
    order = [number for numbers in WORLD.allgather(own()) for number in numbers]
    assert sorted(order) == [*range(20)]
    assert [data.sample(k).slide for k in range(20)] == list(map(str, order))
    assert (np.stack([image for image, _ in data]) == IMAGES[order]).all()
    data.verify()
    WORLD.barrier()
    assert [path.name for path in folder.parent.iterdir()] == ["set"]
    with pytest.raises(ShardError, match="already contains a data set"):
        ShardWriter(folder, comm=WORLD)


@needs_ranks
def test_an_error_of_one_rank_is_one_of_all(folder: Path) -> None:
    last = WORLD.size - 1

    def write() -> None:
        with ShardWriter(folder, comm=WORLD) as writer:
            writer.add(IMAGES[0])
            if WORLD.rank == last:
                raise KeyError("no such file")

    said = "no such file"
    if WORLD.rank != last:
        said = f"rank {last} failed, .* KeyError: 'no such file'"
    with pytest.raises(KeyError if WORLD.rank == last else ShardError, match=said):
        write()
    WORLD.barrier()
    assert not folder.exists()
    assert not parts_folder(folder).exists()


@needs_ranks
def test_settings_of_one_rank_that_are_wrong_or_others_are_told_to_all(folder: Path) -> None:
    first = WORLD.rank == 0
    with pytest.raises((ValueError, ShardError), match="quality is 0"):
        ShardWriter(folder, comm=WORLD, quality=0 if first else 90)
    with (
        pytest.raises(ShardError, match=r"parts differ in mpp: 0\.5 in '00000', None in '00001'"),
        ShardWriter(folder, comm=WORLD, mpp=0.5 if first else None) as writer,
    ):
        writer.add(IMAGES[0])
    WORLD.barrier()
    assert not folder.exists()
    with pytest.raises(ShardError, match="no samples were added"), ShardWriter(folder, comm=WORLD):
        pass
    with ShardWriter(folder, comm=WORLD) as writer:
        writer.add(IMAGES[0])
        writer.abort()
    WORLD.barrier()
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("count", [1, 5])  # fewer than ranks, and an uneven share
def test_ranks_together_find_the_statistics_that_one_does(count, dtype, folder):
    if WORLD.rank == 0:
        draw = np.random.default_rng(0)
        with ShardWriter(folder, ["a"], kind="regions") as writer:
            for number in range(count):
                shape = 5 + number, 7, 2
                writer.add(draw.integers(0, 60_000, shape).astype(dtype), 0, "train")
    WORLD.Barrier()
    source = ShardDataset(folder, "train")
    found = statistics_of(source, "train", MpiCommunicator(WORLD))
    assert WORLD.allgather(found) == [found] * WORLD.size
    WORLD.Barrier()
    if WORLD.rank == 0:
        assert (folder / FILE).is_file()
        (folder / FILE).unlink()
        assert statistics_of(source, "train", SingleProcess()) == found
