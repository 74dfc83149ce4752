"""A shard is copied whole, or not at all, and training reads first."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from spatialdl.data.open_shards import OpenShard
from spatialdl.data.staging import copying
from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.copying import (
    ReadPriority,
    StoppedError,
    fetch,
    is_whole,
    reading_source,
)
from spatialdl.errors import ShardError
from tests.data.conftest import flip


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
    turns = []

    @contextmanager
    def turn():
        turns.append("begins")
        yield
        turns.append("ends")

    assert bring(arrived=lambda: True) == []  # somebody else has copied it meanwhile
    assert not list(tmp_path.glob("[pc]*"))
    heard = bring(turn=turn)
    assert turns == ["begins", "ends"] * len(heard)  # each piece is read in its turn
    assert sum(heard) == info.bytes
    assert max(heard) == 10_000
    assert (tmp_path / "copy").read_bytes() == (folder / info.file).read_bytes()
    assert not (tmp_path / "part").exists()
    assert is_whole(tmp_path / "copy", info)


@pytest.mark.parametrize("stopped_after", [0, 3])
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


def test_a_source_that_is_right_the_second_time_is_taken(bring, folder, tmp_path, info):
    """The source was still being written."""
    whole = (folder / info.file).read_bytes()
    flip(folder / info.file)
    heard: list[int] = []

    def written_meanwhile() -> bool:
        if len(heard) == 1:
            (folder / info.file).write_bytes(whole)
        heard.append(1)
        return False

    assert sum(bring(stopped=written_meanwhile)) == info.bytes
    assert is_whole(tmp_path / "copy", info)


def test_a_shard_that_is_cut_while_it_is_copied_is_told(bring, folder, info, monkeypatch):
    monkeypatch.setattr(copying, "_AT_A_TIME", 10_000)

    def cut() -> bool:
        os.truncate(folder / info.file, 10_000)
        return False

    with pytest.raises(ShardError, match=r"has 10000 bytes, the manifest records"):
        bring(stopped=cut)


def test_a_part_is_nobody_elses(bring, tmp_path):
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


@pytest.fixture
def stopped() -> threading.Event:
    return threading.Event()


@pytest.fixture
def way(tmp_path: Path, stopped: threading.Event):
    made = ReadPriority(tmp_path, stopped)
    yield made
    stopped.set()
    made.close()


def taking_turns(way: ReadPriority, enter) -> threading.Thread:
    def take() -> None:
        with way.turn():
            enter()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def test_a_copier_waits_until_nobody_reads_and_takes_one_piece_at_a_time(way, tmp_path):
    entered = threading.Event()
    with reading_source(tmp_path):
        with reading_source(tmp_path):
            thread = taking_turns(way, entered.set)
        assert not entered.wait(0.2)  # one of the two reads still
    thread.join()
    assert entered.is_set()
    with way.turn():
        second = threading.Event()
        other = taking_turns(way, second.set)
        assert not second.wait(0.1)
    other.join()


def test_a_copier_waits_neither_for_ever_nor_when_it_is_told_to_stop(way, tmp_path, stopped):
    hasty = ReadPriority(tmp_path, stopped, patience=0.05)
    with reading_source(tmp_path):
        taking_turns(hasty, lambda: None).join()
        thread = taking_turns(way, lambda: None)
        stopped.set()
        thread.join()
    hasty.close()
    with reading_source(tmp_path / "nowhere"):  # where no copier is nobody is told
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_reader_that_is_killed_gives_way(way, tmp_path):
    ours, theirs = os.pipe()
    reader = os.fork()
    if reader == 0:
        with reading_source(tmp_path):
            os.write(theirs, b"r")
            signal.pause()
    assert os.read(ours, 1) == b"r"
    entered = threading.Event()
    thread = taking_turns(way, entered.set)
    assert not entered.wait(0.1)
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    thread.join()


def test_boxes_from_the_source_are_told_and_copies_are_not(
    way, dataset, folder, tmp_path, monkeypatch
):
    told = []
    read = OpenShard.read

    def watched(shard, *given) -> None:
        told.append((shard.is_local, way._is_read()))
        read(shard, *given)

    monkeypatch.setattr(OpenShard, "read", watched)
    dataset.read(0)
    dataset.use_copies(tmp_path)
    dataset.read(1)
    dataset.close()
    info = dataset.manifest.shards[0]
    (tmp_path / local_name(info)).symlink_to(folder / info.file)
    dataset.read(0)
    assert told == [(False, False), (False, True), (True, False)]
    assert not way._is_read()
