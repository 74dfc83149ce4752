from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl.data import ShardWriter, join_parts
from spatialdl.data.joining import part_folder, parts_folder
from spatialdl.errors import ShardError

IMAGES = np.random.default_rng(0).integers(0, 256, (9, 40, 30, 3), np.uint8)


def opened(folder: Path) -> Any:
    from spatialdl.data import ShardDataset  # takes PyTorch, which processes that write do not need

    return ShardDataset(folder)


def write(folder: Path, part: str, numbers: list[int], **more: object) -> None:
    settings = {"classes": ["a", "b"], "shard_size": 2 * 40 * 30 * 3, **more}
    with ShardWriter(folder, part=part, **settings) as writer:
        for number in numbers:
            writer.add(IMAGES[number], label=number % 2, slide=f"{part}{number}", split="train")


def test_processes_write_parts_that_become_one_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    given = {"b": [0, 1, 2, 3, 4], "a": [5], "empty": [], "c_1": [6, 7, 8]}
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=write, args=(folder, part, numbers))
        for part, numbers in given.items()
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert not folder.exists()
    join_parts(folder, list(given))
    data = opened(folder)
    data.verify()
    assert [data.sample(k).slide for k in range(9)] == [
        f"{part}{number}" for part, numbers in given.items() for number in numbers
    ]
    assert (np.stack([image for image, _ in data]) == IMAGES).all()
    assert data.labels.tolist() == [number % 2 for number in range(9)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", *(f"shard-{k:05d}.h5" for k in range(6))]


def test_regions_of_parts_keep_their_stripes(tmp_path: Path) -> None:
    for part in ("x", "y"):
        write(tmp_path / "set", part, [0, 1], kind="regions", stripes=2, shard_size=2**20)
    join_parts(tmp_path / "set", ["y", "x"])
    data = opened(tmp_path / "set")
    assert [data.sample(k).id for k in range(4)] == ["y-000000", "y-000001", "x-000000", "x-000001"]
    assert [[band.shard for band in data.sample(k).bands] for k in (0, 2)] == [[0, 1], [2, 3]]
    assert all((data.read(k) == IMAGES[k % 2]).all() for k in range(4))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"classes": ["b", "a"]}, r"classes: \['a', 'b'\] in 'one', \['b', 'a'\] in 'two'"),
        ({"codec": "zstd"}, "codec: 'raw' in 'one', 'zstd' in 'two'"),
        ({"mpp": 0.5}, "mpp: None in 'one', 0.5 in 'two'"),
        ({"kind": "regions"}, "kind: 'tiles' in 'one', 'regions' in 'two'"),
    ],
)
def test_parts_that_differ_are_refused(tmp_path: Path, more: dict, says: str) -> None:
    write(tmp_path / "set", "one", [0])
    write(tmp_path / "set", "two", [1], **more)
    with pytest.raises(ShardError, match=f"parts differ in {says}; write them with the same"):
        join_parts(tmp_path / "set", ["one", "two"])
    assert [path.name for path in tmp_path.iterdir()] == [".set.parts"]
    write(tmp_path / "set", "two", [1])
    join_parts(tmp_path / "set", ["one", "two"])
    assert len(opened(tmp_path / "set")) == 2


def test_parts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "set", "one", [0])
    with pytest.raises(ShardError, match="part 'two' is missing or unfinished"):
        join_parts(tmp_path / "set", ["one", "two"])
    with pytest.raises(ValueError, match="expected a list of distinct names"):
        join_parts(tmp_path / "set", ["one", "one"])
    with pytest.raises(ValueError, match=r"part is '\.\./x', expected a name of 1 to 64 letters"):
        join_parts(tmp_path / "set", ["../x"])
    shard = part_folder(tmp_path / "set", "one") / "shard-00000.h5"
    os.truncate(shard, 100)
    with pytest.raises(ShardError, match="part 'one' is damaged"):
        join_parts(tmp_path / "set", ["one"])
    write(tmp_path / "set", "none", [])
    with pytest.raises(ShardError, match="no samples were added"):
        join_parts(tmp_path / "set", ["none"])
    assert not (tmp_path / "set").exists()


def test_a_data_set_that_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    write(tmp_path / "set", "one", [0])
    with ShardWriter(tmp_path / "set") as writer:
        writer.add(IMAGES[5])
    with pytest.raises(ShardError, match="already contains a data set"):
        join_parts(tmp_path / "set", ["one"])
    with pytest.raises(ShardError, match="already contains a data set"):
        ShardWriter(tmp_path / "set", part="two")
    join_parts(tmp_path / "set", ["one"], overwrite=True)
    assert (opened(tmp_path / "set").read(0) == IMAGES[0]).all()
    assert not parts_folder(tmp_path / "set").exists()


def begin_and_die(folder: Path, part: str | None) -> None:
    writer = ShardWriter(folder, part=part, shard_size=1)
    for image in IMAGES:
        writer.add(image)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("part", [None, "one"])
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path, part: str | None) -> None:
    folder = tmp_path / "set"
    process = multiprocessing.get_context("spawn").Process(
        target=begin_and_die, args=(folder, part)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not folder.exists()
    beside = part_folder(folder, part).parent if part else tmp_path
    (left,) = [path for path in beside.iterdir() if ".partial-" in path.name]
    if part:
        with pytest.raises(ShardError, match="part 'one' is missing or unfinished"):
            join_parts(folder, [part])
    with ShardWriter(folder, part=part) as writer:
        assert not left.exists()
        with ShardWriter(folder, part=part, overwrite=True) as other:
            assert writer.workdir.exists()  # that of the living stays
            other.add(IMAGES[0])
            writer.add(IMAGES[1])
            writer.abort()
    if part:
        join_parts(folder, [part])
    assert (opened(folder).read(0) == IMAGES[0]).all()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
