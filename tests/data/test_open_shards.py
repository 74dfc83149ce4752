"""Shards that are open: which are kept, what changed since, and copies on local disks."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardWriter, open_shards
from spatialdl.data.chunk_map import ChunkMap
from spatialdl.data.format import Manifest
from spatialdl.data.open_shards import ChunkMaps, OpenShard, OpenShards
from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import local_name
from spatialdl.errors import ShardError

TILES = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3), np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "set", shard_size=1) as writer:
        for tile in TILES:
            writer.add(tile)
    return tmp_path / "set"


@pytest.fixture
def infos(folder: Path) -> list[ShardInfo]:
    return Manifest.load(folder).shards


@pytest.fixture
def shards(folder: Path) -> OpenShards:
    return OpenShards(folder, "auto")


def is_read(shards: OpenShards, infos: list[ShardInfo], number: int = 0) -> bool:
    out = np.empty((17, 7, 3), np.uint8)
    shards.get(infos[number]).read("images", out, (0, slice(3, 20), slice(0, 7)))
    return (out == TILES[number, 3:20, :7]).all()


def test_maps_are_kept_when_files_are_closed(shards, infos, monkeypatch) -> None:
    monkeypatch.setattr(open_shards, "_OPEN_SHARDS", 2)
    first = shards.get(infos[0])
    assert all(is_read(shards, infos, number) for number in range(4))
    assert shards.get(infos[0]) is not first
    monkeypatch.setattr(open_shards, "map_chunks", None)
    assert is_read(shards, infos)


def test_maps_are_dropped_when_they_are_many() -> None:
    maps = ChunkMaps(most=5000)
    one = ChunkMap((), (), np.dtype(np.uint8), np.zeros(125, np.int64))  # 1000 bytes, and as many
    for number in range(4):
        maps.put(((0, 0, 0, 0), str(number)), one)
        assert maps.get(((0, 0, 0, 0), "0") if number < 2 else ((0, 0, 0, 0), "2")) is one
    assert [((0, 0, 0, 0), str(k)) in maps for k in range(4)] == [False, False, True, True]


def test_a_file_that_was_written_to_is_opened_again(shards, infos, folder) -> None:
    assert is_read(shards, infos)
    path = folder / infos[0].file
    opened = shards.get(infos[0])
    assert shards.get(infos[0]) is opened
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))
    assert is_read(shards, infos)
    assert shards.get(infos[0]) is not opened


@pytest.mark.parametrize("replaced", [False, True])
def test_a_shard_that_became_another_is_refused(shards, infos, folder, replaced) -> None:
    assert is_read(shards, infos)
    path, other = folder / infos[0].file, folder / infos[3].file
    assert path.stat().st_size == other.stat().st_size
    if replaced:
        path.unlink()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(0, 0))
    shards.close()
    for _ in range(2):
        with pytest.raises(ShardError, match=r"00000\.h5 was changed or replaced since"):
            is_read(shards, infos)
    assert is_read(shards, infos, 1)


def test_a_file_that_is_replaced_while_it_is_open_is_still_the_old_one(shards, infos, folder):
    opened, other = shards.get(infos[0]), shards.get(infos[2])
    opened.h5  # noqa: B018
    (folder / infos[1].file).replace(folder / infos[0].file)
    assert is_read(shards, infos)
    (folder / infos[3].file).replace(folder / infos[2].file)
    with pytest.raises(OSError, match="it was replaced or changed while it was opened"):
        other.h5  # noqa: B018


def test_few_files_are_open_and_descriptors_given_back(shards, infos, monkeypatch) -> None:
    def held() -> int:
        paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(path).startswith(str(shards._folder)) for path in paths)

    assert all(is_read(shards, infos, number) for number in range(4))
    assert 4 <= held() <= 12
    shards.close()
    gc.collect()
    assert held() == 0
    monkeypatch.setattr(open_shards, "_OPEN_SHARDS", 2)
    assert all(is_read(shards, infos, number) for number in range(4))
    gc.collect()
    assert 2 <= held() <= 6
    shards.close()


def test_memory_that_was_read_is_let_go(shards, infos, monkeypatch) -> None:
    forgot = []
    monkeypatch.setattr(OpenShard, "forget", lambda shard: forgot.append(shard))  # noqa: PLW0108
    monkeypatch.setattr(open_shards, "_RESIDENT", 100)
    opened = [shards.get(info) for info in infos[:2]]
    for count, expected in [(60, []), (40, []), (1, opened), (60, opened)]:
        shards.note_read(count)
        assert forgot == expected


@pytest.fixture
def staged(shards, tmp_path, monkeypatch) -> Path:
    """A folder of copies; the shards look into it before each read."""
    monkeypatch.setattr(open_shards, "_LOOK_EVERY_S", 0.0)
    (tmp_path / "job").mkdir()
    shards.local = tmp_path / "job"
    return shards.local


def arrives(staged: Path, infos: list[ShardInfo], number: int) -> Path:
    copy = staged / local_name(infos[number])
    copy.write_bytes((staged.parent / "set" / infos[number].file).read_bytes())
    return copy


def test_a_copy_is_read_when_it_has_arrived(shards, infos, folder, staged, caplog) -> None:
    for _ in range(2):
        assert not shards.get(infos[0]).is_local
        assert is_read(shards, infos)
    arrives(staged, infos, 0)
    before = shards.get(infos[0])
    assert before.is_local
    assert shards.get(infos[0]) is before
    assert not shards.get(infos[1]).is_local
    assert is_read(shards, infos)
    (folder / infos[0].file).unlink()
    assert is_read(shards, infos)
    assert pickle.loads(pickle.dumps(shards)).get(infos[0]).is_local
    assert not caplog.messages


def test_copies_are_not_looked_for_on_each_read(shards, infos, staged, monkeypatch) -> None:
    monkeypatch.setattr(open_shards, "_LOOK_EVERY_S", 1e9)
    shards.get(infos[0])
    arrives(staged, infos, 0)
    assert not shards.get(infos[0]).is_local
    shards.close()
    assert shards.get(infos[0]).is_local


@pytest.mark.parametrize("fault", ["cut", "written to", "gone", "cut before"])
def test_a_copy_that_is_no_good_is_not_read(shards, infos, staged, caplog, fault) -> None:
    copy = arrives(staged, infos, 0)
    if fault != "cut before":
        assert shards.get(infos[0]).is_local
    if fault == "written to":
        copy.write_bytes(bytes(infos[0].bytes))
        os.utime(copy, ns=(0, 0))
    elif fault == "gone":
        copy.unlink()
        shards.close()
    else:
        os.truncate(copy, 1000)
    for _ in range(3):
        assert not shards.get(infos[0]).is_local
        assert is_read(shards, infos)
    [told] = caplog.messages
    assert f"the copy of {infos[0].file} in {staged} is unusable" in told
    # others of the node find out for themselves, and do not say it again
    other = OpenShards(shards._folder, "auto", staged)
    assert other.get(infos[0]).is_local == (fault == "written to")
    assert len(caplog.messages) == 1
