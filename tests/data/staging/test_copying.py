from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from spatialdl.data.staging import copying
from spatialdl.data.staging.copying import (
    BusyError,
    StoppedError,
    WriteError,
    fetch,
    is_still,
    is_whole,
)
from spatialdl.errors import ShardError
from tests.data.staging.conftest import flip_a_bit


@pytest.fixture
def info(dataset):
    return dataset.manifest.shards[1]


@pytest.fixture
def bring(folder, tmp_path, info):
    """Copies a shard to `copy`, by way of `part`; returns what the progress heard."""

    def run(disk: Path = tmp_path, **more) -> list[int]:
        heard: list[int] = []
        part, copy = disk / "part", disk / "copy"
        source = folder / info.file
        fetch(source, part, info, lambda: part.rename(copy), progress=heard.append, **more)
        return heard

    return run


def test_a_copy_is_the_shard(bring, folder, tmp_path, info, monkeypatch):
    monkeypatch.setattr(copying, "_AT_A_TIME", 10_000)
    heard = bring()
    assert sum(heard) == info.bytes
    assert max(heard) == 10_000
    assert (tmp_path / "copy").read_bytes() == (folder / info.file).read_bytes()
    assert not (tmp_path / "part").exists()
    assert is_whole(tmp_path / "copy", info)


@pytest.mark.parametrize("stopped_after", [0, 1, 3])
def test_what_was_stopped_is_resumed(bring, tmp_path, info, monkeypatch, stopped_after):
    monkeypatch.setattr(copying, "_AT_A_TIME", 10_000)
    asked = iter([False] * stopped_after + [True])
    with pytest.raises(StoppedError):
        bring(stopped=lambda: next(asked))
    assert (tmp_path / "part").stat().st_size == stopped_after * 10_000
    read = []
    preadv = os.preadv

    def reading(file, buffers, offset):
        if os.readlink(f"/proc/self/fd/{file}").endswith(info.file):
            read.append(offset)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", reading)
    assert sum(bring()) == info.bytes
    assert read[0] == stopped_after * 10_000, "what is there is not read from the source again"
    assert is_whole(tmp_path / "copy", info)


@pytest.mark.parametrize("rest", ["a hole", "something else", "too much"])
def test_a_part_that_is_not_of_the_shard_is_not_believed(bring, folder, tmp_path, info, rest):
    content = (folder / info.file).read_bytes()
    wrong = {
        "a hole": bytes(5000) + content[5000:20_000],
        "something else": b"something else",
        "too much": content + b"more",
    }
    (tmp_path / "part").write_bytes(wrong[rest])
    assert sum(bring()) == info.bytes
    assert is_whole(tmp_path / "copy", info)


def test_a_flipped_bit_is_told(bring, folder, tmp_path, info):
    flip_a_bit(folder / info.file)
    with pytest.raises(ShardError, match=r"shard-00001\.h5 has SHA-256 .* damaged"):
        bring()
    assert not list(tmp_path.glob("[pc]*"))
    assert not is_whole(folder / info.file, info)


def test_a_source_that_is_right_the_second_time_is_taken(bring, folder, tmp_path, info):
    """The source was still being written."""
    whole = (folder / info.file).read_bytes()
    flip_a_bit(folder / info.file)
    heard: list[int] = []

    def written_meanwhile() -> bool:
        if len(heard) == 1:
            (folder / info.file).write_bytes(whole)
        heard.append(1)
        return False

    assert sum(bring(stopped=written_meanwhile)) == info.bytes
    assert is_whole(tmp_path / "copy", info)


@pytest.mark.parametrize("size", [0, 100, 40_000])
def test_a_cut_shard_is_told(bring, folder, tmp_path, info, size):
    os.truncate(folder / info.file, size)
    with pytest.raises(ShardError, match=f"has {size} bytes, the manifest records {info.bytes}"):
        bring()
    assert not list(tmp_path.glob("[pc]*"))
    assert not is_whole(folder / info.file, info)


def test_a_shard_that_is_cut_while_it_is_copied_is_told(bring, folder, info, monkeypatch):
    monkeypatch.setattr(copying, "_AT_A_TIME", 10_000)

    def cut() -> bool:
        os.truncate(folder / info.file, 10_000)
        return False

    with pytest.raises(ShardError, match=r"has 10000 bytes, the manifest records"):
        bring(stopped=cut)


def test_a_missing_shard_is_the_sources_fault(bring, folder, info):
    (folder / info.file).unlink()
    with pytest.raises(FileNotFoundError) as told:
        bring()
    assert not isinstance(told.value, WriteError)


def test_a_part_has_one_writer(bring, tmp_path):
    with (tmp_path / "part").open("w") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process is writing"):
            bring()
    assert bring()


def test_a_part_is_nobody_elses(bring, folder, tmp_path, info):
    before = os.umask(0)
    try:
        modes = []
        bring(stopped=lambda: bool(modes.append((tmp_path / "part").stat().st_mode & 0o777)))
    finally:
        os.umask(before)
    assert set(modes) == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_part_of_somebody_else_is_not_gone_on_with(bring, tmp_path):
    (tmp_path / "part").touch(0o666)
    os.chown(tmp_path / "part", 65534, 65534)
    with pytest.raises(
        ShardError, match="part belongs to another user: remove it, or choose another f"
    ):
        bring()
    assert (tmp_path / "part").read_bytes() == b""


def test_a_full_disk_is_told_and_left_clean(bring, small_disk):
    disk = small_disk(40)
    with pytest.raises(WriteError) as told:
        bring(disk)
    assert told.value.is_full
    assert not list(disk.iterdir())


def test_a_disk_that_cannot_be_written_to_is_told(bring, small_disk):
    with pytest.raises(WriteError) as told:
        bring(small_disk(400, "ro"))
    assert told.value.errno == errno.EROFS
    assert not told.value.is_full


def test_a_file_is_known_by_its_name(tmp_path):
    with (tmp_path / "a").open("w") as file:
        assert is_still(tmp_path / "a", file.fileno())
        (tmp_path / "a").unlink()
        assert not is_still(tmp_path / "a", file.fileno())
        (tmp_path / "a").touch()
        assert not is_still(tmp_path / "a", file.fileno())


def test_each_piece_is_read_in_its_turn(bring, info, monkeypatch):
    monkeypatch.setattr(copying, "_AT_A_TIME", 10_000)
    turns = []

    @contextmanager
    def turn():
        turns.append("begins")
        yield
        turns.append("ends")

    heard = bring(turn=turn)
    assert turns == ["begins", "ends"] * len(heard)


def test_what_has_arrived_meanwhile_is_not_copied(bring, tmp_path):
    assert bring(arrived=lambda: True) == []
    assert not (tmp_path / "part").exists()
    assert not (tmp_path / "copy").exists()
