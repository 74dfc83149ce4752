"""Copies of whole data sets or splits, copies of the jobs of a node, and the staging command."""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import MANIFEST, Manifest
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.data.staging import command
from spatialdl.data.staging.cache import NodeCache, StagedJob, local_name
from spatialdl.data.staging.command import copy_folder, main
from spatialdl.data.staging.local_disk import DiskSpace, file_system, find_disk, unsuitable
from spatialdl.errors import ShardError
from tests.data.conftest import flip

SCRIPT = Path(__file__).parents[3] / "tools" / "stage_shards.py"
SHARDS = [ShardInfo(f"shard-{n:05d}.h5", 9, "0" * 64, 2) for n in range(3)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "copy"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_copy_is_the_data_set_and_can_be_read_by_others(folder, target):
    before = os.umask(0o022)
    try:
        done = copy_folder(folder, target)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}
    assert contents(target) == contents(folder)
    assert (done.shards, done.there) == (6, 0)
    assert done.bytes == sum(path.stat().st_size for path in folder.glob("*.h5"))
    again = copy_folder(folder, target)
    assert again.there == again.bytes == done.bytes
    flip(target / "shard-00001.h5")  # which is made anew
    done = copy_folder(folder, target)
    assert 0 < done.there < done.bytes
    assert contents(target) == contents(folder)


def test_a_split_is_a_data_set_of_its_own(folder, target):
    assert copy_folder(folder, target, ["val"]).shards == 1
    copy, expected = ShardDataset(target), ShardDataset(folder, "val")
    copy.verify()
    assert copy.splits == ["val"]
    assert all((one == other).all() for (one, _), (other, _) in zip(copy, expected, strict=True))


def test_an_interrupted_copy_goes_on(folder, target, monkeypatch):
    fetch = command.fetch

    def interrupted(source, partial, info, *rest, **more):
        if info.file == "shard-00003.h5":
            partial.write_bytes(source.read_bytes()[:10_000])
            raise KeyboardInterrupt
        fetch(source, partial, info, *rest, **more)

    monkeypatch.setattr(command, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_folder(folder, target, at_once=1)
    assert (target / ".shard-00003.h5.part").stat().st_size == 10_000
    with pytest.raises(ShardError, match=r"it has no manifest\.json"):
        ShardDataset(target)
    monkeypatch.setattr(command, "fetch", fetch)
    assert copy_folder(folder, target).there
    assert contents(target) == contents(folder)


def test_all_that_is_damaged_is_named(folder, target):
    flip(folder / "shard-00001.h5")
    os.truncate(folder / "shard-00003.h5", 100)
    (folder / "shard-00005.h5").unlink()
    with pytest.raises(ShardError, match="3 shards cannot be copied") as told:
        copy_folder(folder, target)
    for text in (
        "shard-00001.h5 has SHA-256",
        "It contains samples 2, 3 (of slide-0)",
        "shard-00003.h5 has 100 bytes",
        "No such file or directory",
        "samples 10, 11 (of slide-2)",
    ):
        assert text in str(told.value)
    assert {path.name for path in target.iterdir()} == {
        *("shard-00000.h5", "shard-00002.h5", "shard-00004.h5")
    }


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


def test_a_disk_without_room_is_told_before_anything_is_copied(folder, small_disk, monkeypatch):
    disk = small_disk(200)
    with pytest.raises(ShardError, match=r"kB required, .* kB available besides what is kept free"):
        copy_folder(folder, disk / "copy")
    assert not list(disk.iterdir())
    disk = small_disk(1000)
    with pytest.raises(ShardError, match=r", 24\.0 kB available"):
        copy_folder(folder, disk, keep_free=1000 * 1024 - 24_000)
    copy_folder(folder, disk, keep_free=1000)
    monkeypatch.setattr(command, "_check_room", lambda *_: None)  # somebody else writes after that
    disk = small_disk(200)
    with pytest.raises(OSError, match=r"cannot write to .*: No space left on device"):
        copy_folder(folder, disk)
    assert not (disk / MANIFEST).exists()


def region(number: int, split: str, *shards: int) -> RegionSample:
    bands = tuple(RegionBand(shard, 4 * n, 4) for n, shard in enumerate(shards))
    height = 4 * len(shards)
    return RegionSample(
        f"{number:06d}", height, 9, None, True, bands, None, split, f"s{number}", 0, 0
    )


STRIPED = Manifest("regions", [], 3, shards=SHARDS)
STRIPED.samples = [region(0, "train", 0, 1), region(1, "val", 2, 1), region(2, "train", 1, 0)]


def test_splits_take_their_shards_with_them(dataset):
    val = dataset.manifest.of_splits(["val"])
    assert val.shards == dataset.manifest.shards[5:]
    assert [(sample.shard, sample.index) for sample in val.samples] == [(0, 0), (0, 1)]
    assert dataset.manifest.of_splits(["val", "train"]) == dataset.manifest
    striped = STRIPED.of_splits(["val"])
    assert striped.shards == SHARDS[1:]
    assert [band.shard for band in striped.samples[0].bands] == [1, 0]
    with pytest.raises(ValueError, match="has no split 'test'; its splits: train, val"):
        STRIPED.of_splits(["test"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}/nowhere", "--to", "{}/copy"], 1, "there is no such folder"),
        (["{}/set", "--to", "{}/set"], 1, "is the data set itself"),
        (["{}/set", "--to", "{}/copy", "--split", "test"], 1, "no split 'test'"),
        (["{}/set", "--to", "{}/copy", "--keep-free", "9999T"], 1, ", 0 bytes available"),
        (["--to", "{}/copy"], 2, "give either a data set folder to copy, or --clean"),
        (["{}/set", "--to", "{}/copy", "--jobs", "0"], 2, "'0' is not a whole number"),
        (["{}/set", "--to", "{}/copy", "--keep-free", "much"], 2, "'much' is not a size"),
    ],
)
def test_a_mistake_is_told(arguments, code, text, folder, tmp_path, capsys):
    try:
        found = main([one.format(tmp_path) for one in arguments])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_the_script_copies(folder, tmp_path, capsys, monkeypatch):
    arguments = [str(folder), "--to", str(tmp_path / "copy"), "--split", "val", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not stop.value.code
    assert capsys.readouterr().out == f"1 shard (49.1 kB) verified in {tmp_path}/copy\n"
    assert (tmp_path / "copy" / MANIFEST).exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_go_on(folder, tmp_path, capsys, monkeypatch, number, code):
    def interrupted(*_, **__):
        signal.raise_signal(number)

    monkeypatch.setattr(command, "copy_folder", interrupted)
    assert main([str(folder), "--to", str(tmp_path / "copy")]) == code
    assert capsys.readouterr().err == "interrupted; run the same command again to resume\n"


def test_what_jobs_left_is_removed(tmp_path, dataset, capsys):
    cache, info = NodeCache(tmp_path), dataset.manifest.shards[0]
    job = cache.join([])
    cache.partial(info).write_bytes((dataset.path / info.file).read_bytes())
    cache.publish(info, job.path)
    assert main(["--clean", "--to", str(tmp_path)]) == 0
    assert len(list(job.path.glob("*.h5"))) == 1, "that job is alive"
    cache.leave(job.path, keep=True)
    job.close()
    capsys.readouterr()
    assert main(["--clean", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"removed 49.1 kB of finished jobs from {tmp_path}\n"
    assert not cache.path.exists()


ONE, TWO = (ShardInfo(f"shard-0000{n}.h5", 3, str(n) * 64, 1) for n in (1, 2))


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "disk")


def put(cache: NodeCache, job: StagedJob, info: ShardInfo) -> None:
    """As a copier does."""
    cache.partial(info).write_text("abc")
    cache.publish(info, job.path)


def names(job: StagedJob) -> set[str]:
    return {path.name for path in job.path.glob("*.h5")}


def test_a_job_has_what_was_published_for_it_and_takes_nothing_away_from_another(cache):
    one, two = cache.join([ONE]), cache.join([ONE, TWO])
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    assert not names(one)
    put(cache, one, ONE)
    assert names(one) == {local_name(ONE)}
    assert not cache.partial(ONE).exists()
    assert cache.take_over(ONE, two.path)
    assert not cache.take_over(TWO, two.path)
    put(cache, two, TWO)
    for _ in range(2):
        cache.leave(one.path, keep=False)
    one.close()
    assert names(two) == {local_name(ONE), local_name(TWO)}
    cache.leave(two.path, keep=False)
    two.close()
    assert not cache.path.exists()
    assert cache.path.parent.exists()


def test_a_dead_job_is_known_by_its_lock(cache):
    dead, alive = cache.join([]), cache.join([])
    put(cache, dead, ONE)
    put(cache, alive, TWO)
    cache.partial(ONE).write_text("a")
    dead.close()  # as its process ends
    new = cache.join([ONE])
    assert not dead.path.exists()
    assert names(alive) == {local_name(TWO)}
    assert new.unchecked(ONE).read_text() == "abc"
    assert cache.partial(ONE).exists(), "it may be resumed"
    cache.leave(alive.path, keep=False)
    assert not cache.partial(ONE).exists(), "nobody writes it"
    assert new.unchecked(ONE).exists()


def test_a_part_that_is_being_written_stays(cache):
    job = cache.join([])
    with cache.partial(ONE).open("w") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        cache.join([])
        assert cache.partial(ONE).exists()
    cache.join([])
    assert not cache.partial(ONE).exists()
    job.close()


def test_a_damaged_copy_is_taken_away_from_everybody(cache):
    one, two = cache.join([]), cache.join([])
    put(cache, one, ONE)
    cache.take_over(ONE, two.path)
    cache.leave(one.path, keep=True)
    three = cache.join([ONE])
    three.reject(ONE)
    assert not any(cache.path.rglob(local_name(ONE)))
    assert not three.unchecked(ONE).exists()


def test_a_folder_of_somebody_else_is_refused_and_an_open_one_closed(cache, tmp_path):
    cache.path.mkdir(parents=True, mode=0o755)
    cache.join([])
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    other = NodeCache(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "theirs").mkdir()
    for make in (
        lambda: other.path.symlink_to(tmp_path / "theirs"),
        lambda: other.path.write_text(""),
        *[lambda: (other.path.mkdir(), os.chown(other.path, 12345, -1))] * (os.getuid() == 0),
    ):
        make()
        with pytest.raises(ShardError, match="is not a folder owned by this user"):
            other.join([])
        other.path.rename(tmp_path / f"moved-{len(list(tmp_path.iterdir()))}")


def test_a_full_disk_leaves_no_job(small_disk):
    full = NodeCache(small_disk(4, "nr_inodes=7"))
    with pytest.raises(OSError, match="No space left"):
        full.join([])
    assert not list((full.path / "jobs").iterdir())


def test_a_name_is_a_checksum():
    for sha256 in ("", "../../../etc/passwd", "A" * 64, "0" * 63):
        with pytest.raises(ShardError, match=r"the manifest is damaged: .* is not a SHA-256"):
            local_name(ShardInfo("shard-00000.h5", 1, sha256, 1))


def test_room_is_what_is_free_but_for_a_reserve_and_promised_once(small_disk):
    disk = small_disk(1000)
    assert DiskSpace(disk).bytes == 950 * 1024  # 5 % of a small disk stay free
    assert DiskSpace(disk, 100_000).bytes == 1000 * 1024 - 100_000
    (disk / "of-others").write_bytes(bytes(400 * 1024))
    assert DiskSpace(disk).bytes == 550 * 1024
    found = os.statvfs("/")
    if found.f_blocks * found.f_frsize >= 20 * 2**30:  # of a large one a gibibyte stays free
        held = DiskSpace(Path("/"), keep_free=0).bytes - DiskSpace(Path("/")).bytes
        assert held == pytest.approx(2**30, abs=2**28)  # others write meanwhile
    room = DiskSpace(small_disk(1000), keep_free=0)
    assert room.reserve(600 * 1024)
    assert not room.reserve(401 * 1024)
    assert room.reserve(400 * 1024)
    assert room.bytes == 0
    room.release(600 * 1024)
    assert room.reserve(600 * 1024)


def test_the_first_place_that_will_do_is_taken(tmp_path, small_disk):
    (tmp_path / "job").mkdir()
    (tmp_path / "tmp").mkdir()
    both = {"SLURM_TMPDIR": str(tmp_path / "job"), "TMPDIR": str(tmp_path / "tmp")}
    assert find_disk(both) == (tmp_path / "job", "")
    (tmp_path / "job").rmdir()
    assert find_disk(both) == (tmp_path / "tmp", f"{tmp_path}/job is not a folder")
    memory = small_disk(100)
    disk, why = find_disk({"TMPDIR": str(memory)})
    assert disk in (Path("/local/scratch"), Path("/tmp"), None)
    assert why.startswith(f"{memory} is memory (tmpfs)")


def test_what_speaks_against_a_place(tmp_path, small_disk):
    assert unsuitable(tmp_path) is None
    assert unsuitable(Path("/proc")) == "is not writable" or os.getuid() == 0
    assert unsuitable(small_disk(100, "ro")) == "is not writable"
    if Path("/dev/mqueue").is_dir():  # a file system that nobody knows to be local
        assert unsuitable(Path("/dev/mqueue")) == "is on a network file system (mqueue)"


def test_file_systems_are_found_by_their_mounts(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:40 / /data rw shared:5 - nfs4 server:/data rw\n"
        "3 2 0:41 / /data/my\\040set rw - lustre mds@tcp:/x rw\n"
        "4 1 0:42 / /data/hidden rw - xfs /dev/sdb rw\n"
        "5 4 0:43 / /data/hidden rw - fuse.gcsfuse bucket rw\n"
    )
    (tmp_path / "link").symlink_to("/data")
    for path, kind in [
        *(("/home/a", "ext4"), ("/data/a", "nfs4"), ("/database/a", "ext4")),
        *(("/data/my set/a.h5", "lustre"), ("/data/hidden/a", "fuse.gcsfuse")),
        (tmp_path / "link/a", "nfs4"),
    ]:
        assert file_system(Path(path), table) == kind
    assert file_system(Path("/a"), tmp_path / "none") is None
