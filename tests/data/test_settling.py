from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import sha256_of
from spatialdl.data.settling import Settling
from spatialdl.data.shard_file import ShardFile


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
