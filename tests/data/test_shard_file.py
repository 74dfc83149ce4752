from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.format import sha256_of
from spatialdl.data.shard_file import ShardFile


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
