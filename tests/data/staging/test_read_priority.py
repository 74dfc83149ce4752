from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spatialdl.data.open_shards import OpenShard
from spatialdl.data.staging import read_priority
from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.read_priority import ReadPriority, reading_source


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


def test_a_copier_waits_until_nobody_reads(way, tmp_path):
    entered = threading.Event()
    with reading_source(tmp_path):
        with reading_source(tmp_path):
            thread = taking_turns(way, entered.set)
        assert not entered.wait(0.2)  # one of the two reads still
    thread.join()
    assert entered.is_set()


def test_a_copier_reads_one_piece_at_a_time_where_others_read(way, tmp_path):
    entered = threading.Event()
    with reading_source(tmp_path):
        thread = taking_turns(way, entered.set)
        assert not entered.wait(0.05)
    with way.turn():
        second = threading.Event()
        other = taking_turns(way, second.set)
        assert not second.wait(0.1)
    for one in (thread, other):
        one.join()


def test_a_copier_alone_reads_several_pieces_at_a_time(way, monkeypatch):
    monkeypatch.setattr(read_priority, "_UNCONTESTED_S", 0.0)
    together = threading.Barrier(4, timeout=30)
    threads = [taking_turns(way, together.wait) for _ in range(3)]
    together.wait()
    for thread in threads:
        thread.join()


def test_a_copier_does_not_wait_for_ever(tmp_path, stopped):
    way = ReadPriority(tmp_path, stopped, patience=0.05)
    with reading_source(tmp_path):
        taking_turns(way, lambda: None).join()
    way.close()


def test_a_copier_that_is_told_to_stop_does_not_wait(way, tmp_path, stopped):
    with reading_source(tmp_path):
        thread = taking_turns(way, lambda: None)
        stopped.set()
        thread.join()


def test_a_reader_that_is_killed_gives_way(way, tmp_path):
    program = (
        "import pathlib, sys; from spatialdl.data.staging.read_priority import reading_source\n"
        "with reading_source(pathlib.Path(sys.argv[1])): print('reads', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout.readline() == b"reads\n"
        entered = threading.Event()
        thread = taking_turns(way, entered.set)
        assert not entered.wait(0.1)
        reader.kill()
    thread.join()


def test_where_no_copier_is_nobody_is_told(tmp_path):
    with reading_source(tmp_path / "nowhere"):
        pass
    assert not list(tmp_path.iterdir())


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
