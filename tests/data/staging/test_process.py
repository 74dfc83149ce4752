"""Real copiers, as a job starts them, and what goes wrong around them."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from pathlib import Path

import pytest

from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.copying import fetch
from spatialdl.data.staging.process import CopierProcess
from tests.data.conftest import flip
from tests.data.staging.conftest import until


@pytest.fixture
def job(folder, tmp_path, dataset):
    """A job that is killed before it can end its copier: its process and its copier's."""
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        copier = CopierProcess(folder, tmp_path / "disk", dataset.manifest.shards, keep=False)
        copier.start(dataset.manifest.shards)
        os.write(theirs, f"{copier._process.pid}".encode())
        signal.pause()
    os.close(theirs)
    copier = int(os.read(ours, 20))
    os.close(ours)
    return process, copier


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.fixture
def start(folder, tmp_path, dataset):
    """Starts copiers for the shards of the data set, and ends them at last."""
    started = []

    def run(
        disk: Path = tmp_path / "disk",
        keep: bool = False,
        begin: bool = True,
        source: Path = folder,
    ):
        shards = dataset.manifest.shards
        copier = CopierProcess(source, disk, shards, keep)
        started.append(copier)
        if begin:
            copier.start(shards)
        return copier

    yield run
    for copier in started:
        copier.close()


def is_done(copier: CopierProcess) -> bool:
    copier.look()
    return copier.shards["done"] == 1


def ended(copier: CopierProcess) -> CopierProcess:
    until(lambda: is_done(copier))
    return copier


def left_on(disk: Path) -> list[Path]:
    return list(disk.rglob("*"))


def test_copies_are_read_as_they_arrive_and_go_with_the_job(
    start, folder, tmp_path, dataset, monkeypatch, caplog
):
    monkeypatch.setattr("spatialdl.data.open_shards._LOOK_EVERY_S", 0.0)
    expected = [dataset.read(n) for n in range(12)]
    copier = start(begin=False)
    dataset.use_copies(copier.folder)
    assert not any(shard.is_local for shard in dataset._shards._shards.values())
    copier.start(dataset.manifest.shards)
    while not is_done(copier):
        assert all((dataset.read(n) == expected[n]).all() for n in range(12))
    assert all((dataset.read(n) == expected[n]).all() for n in range(12))
    assert [shard.is_local for shard in dataset._shards._shards.values()] == [True] * 6
    assert not caplog.messages
    assert copier.shards == {"copied": 6, "done": 1}
    size = sum(info.bytes for info in dataset.manifest.shards)
    assert copier.bytes == {"copied": size, "moved": size, "done": 0}
    for info in dataset.manifest.shards:
        copy = copier.folder / local_name(info)
        assert copy.read_bytes() == (folder / info.file).read_bytes()
    process = copier._process
    assert os.getpgid(process.pid) == process.pid, "it is not in our group"
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # to everybody
        os.kill(process.pid, getattr(signal, name))
    copier.close()
    assert process.returncode == 0
    assert not left_on(tmp_path / "disk")


def test_kept_copies_are_checked_and_used_again(start, tmp_path, dataset):
    ended(start(keep=True)).close()
    shards = tmp_path / "disk" / f".spatialdl-{os.getuid()}" / "shards"
    damaged = shards / local_name(dataset.manifest.shards[2])
    damaged.chmod(0o600)
    flip(damaged)
    copier = ended(start())
    assert len(copier.there) == 6
    assert copier.shards == {"reused": 5, "copied": 1, "done": 1}
    assert copier.bytes["moved"] == sum(copier.bytes[what] for what in ("reused", "copied")) + (
        dataset.manifest.shards[2].bytes
    )
    info = dataset.manifest.shards[2]
    fresh = (copier.folder / local_name(info)).read_bytes()
    assert fresh == (dataset.path / info.file).read_bytes()


def test_what_another_job_copies_is_waited_for(start, folder, dataset):
    info = dataset.manifest.shards[0]
    other = start(begin=False)
    part = other._cache.partial(info)
    with part.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        copier = start()
        until(lambda: copier.look() or copier.shards["copied"] == 5)
        assert not copier.shards["done"]
    part.unlink()
    fetch(folder / info.file, part, info, lambda: other._cache.publish(info, other.folder))
    ended(copier)
    assert copier.shards["copied"] + copier.shards["reused"] == 6


def test_what_is_damaged_or_cannot_be_read_is_told_and_stays_at_the_source(start, folder, caplog):
    flip(folder / "shard-00001.h5")
    os.truncate(folder / "shard-00003.h5", 1000)
    (folder / "shard-00002.h5").unlink()
    (folder / "shard-00002.h5").symlink_to(folder)  # for root no permission is denied
    (folder / "shard-00004.h5").unlink()
    copier = ended(start())
    assert sorted(copier.damaged) == ["shard-00001.h5", "shard-00003.h5"]
    assert copier.shards["copied"] == copier.shards["unreadable"] == 2
    told = [text for text in caplog.messages if f"are read from {folder}" in text]
    assert len(told) == 1
    assert "shard-0000" in told[0]


def test_a_small_disk_takes_what_fits(start, small_disk, dataset, caplog):
    one = max(info.bytes for info in dataset.manifest.shards)
    disk = small_disk(3 * one // 1024)
    copier = ended(start(disk))
    assert copier.shards["copied"] == 2
    assert copier.shards["left"] == 4
    assert len(list(copier.folder.glob("*.h5"))) == 2
    assert not list(disk.rglob("*.part"))
    [told] = caplog.messages
    assert "no space left for it" in told


def test_a_disk_that_others_fill_meanwhile_is_left_clean(start, small_disk, dataset):
    disk = small_disk(sum(info.bytes for info in dataset.manifest.shards) // 1024 + 400)
    copier = start(disk, begin=False)
    (disk / "of-others").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - 60_000))
    copier.start(dataset.manifest.shards)
    ended(copier)
    assert copier.shards["copied"] + copier.shards["left"] == 6
    assert copier.shards["left"]
    assert not list(disk.rglob("*.part"))


def test_a_disk_that_fails_is_said_once(start, dataset, caplog):
    copier = start(begin=False)
    shards = copier._cache.path / "shards"
    shards.rename(shards.with_name("elsewhere"))
    shards.write_text("no folder")
    copier.start(dataset.manifest.shards)
    ended(copier)
    assert copier.shards == {"left": 6, "done": 1}
    [told] = caplog.messages
    assert "cannot write to " in told
    assert ": Not a directory; shards missing in" in told
    shards.unlink()
    shards.with_name("elsewhere").rename(shards)


def test_a_killed_copier_is_said_once(start, tmp_path, caplog):
    copier = start()
    os.kill(copier._process.pid, signal.SIGKILL)
    copier._process.wait()
    for _ in range(3):
        copier.look()
    [told] = caplog.messages
    assert "the copier was killed (SIGKILL); shards missing in" in told
    copier.close()
    assert not left_on(tmp_path / "disk")


def test_a_copier_that_fails_says_why(start, caplog, monkeypatch):
    monkeypatch.setattr("spatialdl.data.staging.process.json.dumps", lambda order: "nonsense")
    copier = start()
    until(lambda: copier.look() or bool(caplog.messages))
    copier.look()
    [told] = caplog.messages
    assert "the copier exited (1): json.decoder.JSONDecodeError: " in told


def test_a_copier_that_stands_still_is_said_once_and_holds_up_nobody(
    start, folder, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("spatialdl.data.staging.process._SLOW_AFTER_S", 0.1)
    copier = start()
    os.kill(copier._process.pid, signal.SIGSTOP)
    until(lambda: copier.look() or bool(caplog.messages))
    said_at = copier._since
    until(lambda: copier.look() or copier._since > said_at)
    [told] = caplog.messages
    assert re.search(
        r"copying is slow or has stalled: 0 bytes in the last \d+ s; shards missing", told
    )
    assert f"are read from {folder}" in told
    monkeypatch.setattr("spatialdl.data.staging.process._PATIENCE_S", 0.1)
    copier.close()
    assert "the copier did not exit and was killed" in caplog.messages[1]
    assert not list((tmp_path / "disk").rglob("*.h5"))


def test_a_copier_outlives_a_killed_job_to_clean_up(job, tmp_path):
    process, _ = job
    until(lambda: any((tmp_path / "disk").rglob("*.h5")))
    kill(process)
    until(lambda: not left_on(tmp_path / "disk"))


def test_a_job_is_not_dead_while_its_copier_lives(start, job, tmp_path):
    process, copier = job
    until(lambda: len(list((tmp_path / "disk").rglob("jobs/*/*.h5"))) == 6)
    os.kill(copier, signal.SIGSTOP)
    try:
        kill(process)
        other = start(begin=False)
        assert len(list((tmp_path / "disk").rglob("jobs/*/*.h5"))) == 6
        other.close()
    finally:
        os.kill(copier, signal.SIGCONT)
    until(lambda: not left_on(tmp_path / "disk"))
