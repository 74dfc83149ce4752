from __future__ import annotations

import os
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import sha256_of
from spatialdl.data.shard_file import Settling, ShardFile


def filled(folder: Path, rows: int = 1000) -> ShardFile:
    shard = ShardFile(folder, 7)
    values = np.arange(rows * 1024, dtype=np.uint8).reshape(rows, 1024)
    shard.h5.create_dataset("images", data=values, chunks=(200, 1024))
    shard.samples = 3
    return shard


def test_it_has_its_name_when_it_is_whole(tmp_path):
    shard = filled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00007.h5.tmp"]
    info = shard.finish()
    (path,) = tmp_path.iterdir()
    assert path.name == info.file == "shard-00007.h5"
    assert (info.bytes, info.samples) == (path.stat().st_size, 3)
    assert info.sha256 == sha256_of(path)


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        assert not (tmp_path / "shard-00007.h5").exists() or synced[-1] == tmp_path.name
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    filled(tmp_path).finish()
    assert synced[0] == "shard-00007.h5.tmp"
    assert synced[-1] == tmp_path.name


def test_one_that_is_not_on_the_disk_never_gets_its_name(tmp_path, monkeypatch):
    def full(fd: int) -> None:
        raise OSError("disk full")

    shard = filled(tmp_path)
    shard.close()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        shard.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00007.h5.tmp"]


def test_large_chunks_begin_with_a_page(tmp_path):
    shard = filled(tmp_path)
    shard.h5["small"] = np.arange(10)
    with h5py.File(tmp_path / shard.finish().file) as file:
        images = file["images"].id
        offsets = [images.get_chunk_info(k).byte_offset for k in range(images.get_num_chunks())]
    assert len(offsets) == 5
    assert all(offset % 4096 == 0 for offset in offsets)


def shard(folder: Path, number: int) -> ShardFile:
    file = ShardFile(folder, number)
    file.h5["a"] = np.arange(1000 * (number + 1))
    file.samples = number
    return file


def test_shards_are_settled_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    settling = Settling()
    for number in (1, 0, 3, 2, 4):
        settling.add(shard(tmp_path, number))
    infos = settling.finish()
    assert [info.file for info in infos] == sorted(os.listdir(tmp_path))
    assert [info.samples for info in infos] == [0, 1, 2, 3, 4]
    for info in infos:
        path = tmp_path / info.file
        assert (info.bytes, info.sha256) == (path.stat().st_size, sha256_of(path))


def test_what_failed_is_told_by_those_that_follow_and_in_the_end(tmp_path: Path) -> None:
    settling = Settling()
    files = [shard(tmp_path, number) for number in range(4)]
    (tmp_path / "shard-00000.h5.tmp").unlink()
    settling.add(files[0])
    told = 0
    for file in files[1:]:
        try:
            settling.add(file)
        except FileNotFoundError:
            told += 1
    assert told >= 1  # the last finds two waiting, at the latest
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"shard-00000\.h5\.tmp"):
            settling.finish()
    settling.abort()


def test_nothing_is_written_after_an_abort(tmp_path: Path) -> None:
    settling = Settling()
    for number in range(3):
        file = shard(tmp_path, number)
        file.h5["large"] = np.zeros(2_000_000)
        settling.add(file)
    settling.abort()
    assert not [one for one in threading.enumerate() if one.name.startswith("settling")]
    settled = {name for name in os.listdir(tmp_path) if name.endswith(".h5")}
    left = {name for name in os.listdir(tmp_path) if name.endswith(".tmp")}
    assert len(settled) + len(left) == 3
    with pytest.raises(RuntimeError):
        settling.add(shard(tmp_path, 3))


@pytest.mark.parametrize("kind", ["tiles", "regions"])
def test_a_shard_that_cannot_be_settled_leaves_no_folder(tmp_path: Path, kind: str) -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    writer = ShardWriter(tmp_path / "set", kind=kind, shard_size=2 * image.nbytes)
    writer.add(image)
    (writer.workdir / "shard-00000.h5.tmp").unlink()
    writer.add(image)
    with pytest.raises(FileNotFoundError):
        writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["tiles", "regions"])
def test_many_shards_are_written(tmp_path: Path, kind: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 64, 48, 3), np.uint8)
    with ShardWriter(tmp_path / "set", kind=kind, shard_size=images[0].nbytes) as writer:
        for image in images:
            writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert len(data.manifest.shards) == 20
    data.verify()
    assert all((data.read(k) == image).all() for k, image in enumerate(images))
