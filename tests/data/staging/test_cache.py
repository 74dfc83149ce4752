from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from spatialdl.data.samples import ShardInfo
from spatialdl.data.staging.cache import NodeCache, StagedJob, local_name
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


def test_a_job_has_what_was_published_for_it_and_leaves_nothing(cache):
    job = cache.join([ONE, TWO])
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    assert not names(job)
    put(cache, job, ONE)
    assert names(job) == {local_name(ONE)}
    assert not cache.partial(ONE).exists()
    cache.leave(job.path, keep=False)
    cache.leave(job.path, keep=False)
    job.close()
    assert not cache.path.exists()
    assert cache.path.parent.exists()


def test_a_job_takes_nothing_away_from_another(cache):
    one, two = cache.join([ONE]), cache.join([ONE, TWO])
    put(cache, one, ONE)
    assert cache.take_over(ONE, two.path)
    assert not cache.take_over(TWO, two.path)
    put(cache, two, TWO)
    cache.leave(one.path, keep=False)
    one.close()
    assert names(two) == {local_name(ONE), local_name(TWO)}
    cache.leave(two.path, keep=False)
    two.close()
    assert not cache.path.exists()


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


def test_a_folder_of_somebody_else_is_refused(cache, tmp_path):
    cache.path.parent.mkdir()
    (tmp_path / "theirs").mkdir()
    cache.path.symlink_to(tmp_path / "theirs")
    with pytest.raises(ShardError, match="is not a folder owned by this user"):
        cache.join([])
    cache.path.unlink()
    cache.path.write_text("")
    with pytest.raises(ShardError, match="is not a folder owned by this user"):
        cache.join([])
    cache.path.unlink()
    if os.getuid() != 0:
        return
    cache.path.mkdir()
    os.chown(cache.path, 12345, -1)
    with pytest.raises(ShardError, match="is not a folder owned by this user"):
        cache.join([])


def test_a_folder_that_others_may_read_is_closed(cache):
    cache.path.mkdir(parents=True, mode=0o755)
    cache.join([])
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700


def test_a_full_disk_leaves_no_job(cache, small_disk):
    disk = small_disk(4, "nr_inodes=7")
    full = NodeCache(disk)
    with pytest.raises(OSError, match="No space left"):
        full.join([])
    assert not list((full.path / "jobs").iterdir())


@pytest.mark.parametrize("sha256", ["", "../../../etc/passwd", "A" * 64, "0" * 63])
def test_a_name_is_a_checksum(sha256):
    with pytest.raises(ShardError, match=r"the manifest is damaged: .* is not a SHA-256"):
        local_name(ShardInfo("shard-00000.h5", 1, sha256, 1))
