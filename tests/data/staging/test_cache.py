"""The copies of the jobs of a node on its disk, and which disk."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import NodeCache, StagedJob, local_name
from spatialdl.data.staging.local_disk import DiskSpace, find_disk, unsuitable
from spatialdl.errors import ShardError

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


def test_what_is_kept_is_there_for_later_jobs(cache):
    job = cache.join([ONE])
    put(cache, job, ONE)
    cache.partial(TWO).write_text("a")
    cache.leave(job.path, keep=True)
    job.close()
    later = cache.join([ONE, TWO])
    assert not names(later), "it has to be checked first"
    assert later.unchecked(ONE).read_text() == "abc"
    assert cache.partial(TWO).read_text() == "a"
    later.accept(ONE)
    assert names(later) == {local_name(ONE)}
    cache.leave(later.path, keep=False)
    later.close()
    other = cache.join([])
    cache.leave(other.path, keep=False)
    other.close()
    assert [path.name for path in (cache.path / "shards").iterdir()] == [local_name(ONE)]
    assert cache.clean() == 3
    assert not cache.path.exists()
    assert cache.clean() == 0


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
    assert unsuitable(tmp_path / "nothing") == "is not a folder"
    assert unsuitable(Path("/proc")) == "is not writable" or os.getuid() == 0
    assert unsuitable(small_disk(100)) == "is memory (tmpfs)"
    assert unsuitable(small_disk(100, "ro")) == "is not writable"
    if Path("/dev/mqueue").is_dir():  # a file system that nobody knows to be local
        assert unsuitable(Path("/dev/mqueue")) == "is on a network file system (mqueue)"
