from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import MANIFEST
from spatialdl.data.staging import whole
from spatialdl.data.staging.whole import copy_folder
from spatialdl.errors import ShardError
from tests.data.staging.conftest import flip_a_bit


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "copy"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_copy_is_the_data_set(folder, target):
    done = copy_folder(folder, target)
    assert contents(target) == contents(folder)
    assert (done.shards, done.there) == (6, 0)
    assert done.bytes == sum(path.stat().st_size for path in folder.glob("*.h5"))
    again = copy_folder(folder, target)
    assert again.there == again.bytes == done.bytes


def test_a_split_is_a_data_set_of_its_own(folder, target):
    assert copy_folder(folder, target, ["val"]).shards == 1
    copy, expected = ShardDataset(target), ShardDataset(folder, "val")
    copy.verify()
    assert copy.splits == ["val"]
    assert all((one == other).all() for (one, _), (other, _) in zip(copy, expected, strict=True))
    with pytest.raises(ValueError, match="has no split 'test'; its splits: train, val"):
        copy_folder(folder, target.with_name("other"), ["test"])


def test_a_copy_can_be_read_by_others(folder, target):
    before = os.umask(0o022)
    try:
        copy_folder(folder, target)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}


def test_an_interrupted_copy_goes_on(folder, target, monkeypatch):
    fetch = whole.fetch

    def interrupted(source, partial, info, *rest, **more):
        if info.file == "shard-00003.h5":
            partial.write_bytes(source.read_bytes()[:10_000])
            raise KeyboardInterrupt
        fetch(source, partial, info, *rest, **more)

    monkeypatch.setattr(whole, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_folder(folder, target, at_once=1)
    assert (target / ".shard-00003.h5.part").stat().st_size == 10_000
    with pytest.raises(ShardError, match=r"it has no manifest\.json"):
        ShardDataset(target)
    monkeypatch.setattr(whole, "fetch", fetch)
    assert copy_folder(folder, target).there
    assert contents(target) == contents(folder)


def test_all_that_is_damaged_is_named(folder, target):
    flip_a_bit(folder / "shard-00001.h5")
    os.truncate(folder / "shard-00003.h5", 100)
    (folder / "shard-00005.h5").unlink()
    with pytest.raises(ShardError, match="3 shards cannot be copied") as told:
        copy_folder(folder, target)
    for text in (
        "shard-00001.h5 has SHA-256",
        "samples 2, 3 (of slide-0)",
        "shard-00003.h5 has 100 bytes",
        "No such file or directory",
        "samples 10, 11 (of slide-2)",
    ):
        assert text in str(told.value)
    assert {path.name for path in target.iterdir()} == {
        *("shard-00000.h5", "shard-00002.h5", "shard-00004.h5")
    }


def test_a_copy_that_was_damaged_is_made_anew(folder, target):
    copy_folder(folder, target)
    flip_a_bit(target / "shard-00001.h5")
    done = copy_folder(folder, target)
    assert 0 < done.there < done.bytes
    assert contents(target) == contents(folder)


def test_files_of_others_are_not_replaced(folder, target, tmp_path):
    target.mkdir(parents=True)
    (target / "shard-00001.h5").write_text("mine")
    with pytest.raises(ShardError, match=r"shard-00001\.h5 differs from .* remove it"):
        copy_folder(folder, target)
    assert (target / "shard-00001.h5").read_text() == "mine"
    assert not (target / MANIFEST).exists()
    other = tmp_path / "other"
    with ShardWriter(other) as writer:
        writer.add(np.zeros((4, 4, 3), np.uint8))
    before = contents(other)
    with pytest.raises(ShardError, match="contains another data set"):
        copy_folder(folder, other)
    assert contents(other) == before
    with pytest.raises(ShardError, match="is the data set itself"):
        copy_folder(folder, folder)
    with pytest.raises(ShardError, match="is a file; choose a folder"):
        copy_folder(folder, target / "shard-00001.h5")


def test_two_copies_to_one_folder_do_not_clash(folder, target):
    target.mkdir(parents=True)
    with (target / ".shard-00002.h5.part").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ShardError, match=r"another process is writing .* wait for it"):
            copy_folder(folder, target)
    copy_folder(folder, target)
    assert contents(target) == contents(folder)


def test_a_disk_without_room_is_told_before_anything_is_copied(folder, small_disk):
    disk = small_disk(200)
    with pytest.raises(ShardError, match=r"kB required, .* kB available besides what is kept free"):
        copy_folder(folder, disk / "copy")
    assert not list(disk.iterdir())
    disk = small_disk(1000)
    with pytest.raises(ShardError, match=r", 24\.0 kB available"):
        copy_folder(folder, disk, keep_free=1000 * 1024 - 24_000)
    copy_folder(folder, disk, keep_free=1000)


def test_a_disk_that_fills_meanwhile_is_told(folder, small_disk, monkeypatch):
    disk = small_disk(200)
    monkeypatch.setattr(whole, "_check_room", lambda *_: None)  # somebody else writes after that
    with pytest.raises(OSError, match=r"cannot write to .*: No space left on device"):
        copy_folder(folder, disk)
    assert not (disk / MANIFEST).exists()
