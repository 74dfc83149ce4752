from __future__ import annotations

import os
from pathlib import Path

import pytest

from spatialdl.data.staging.local_disk import DiskSpace, find_disk, unsuitable


def test_room_is_what_is_free_but_for_a_reserve(small_disk):
    disk = small_disk(1000)
    assert DiskSpace(disk).bytes == 950 * 1024  # 5 % of a small disk stay free
    assert DiskSpace(disk, 100_000).bytes == 1000 * 1024 - 100_000
    (disk / "of-others").write_bytes(bytes(400 * 1024))
    assert DiskSpace(disk).bytes == 550 * 1024


def test_room_is_promised_once(small_disk):
    room = DiskSpace(small_disk(1000), keep_free=0)
    assert room.reserve(600 * 1024)
    assert not room.reserve(401 * 1024)
    assert room.reserve(400 * 1024)
    assert room.bytes == 0
    room.release(600 * 1024)
    assert room.reserve(600 * 1024)


def test_of_a_large_disk_a_gibibyte_stays_free():
    found = os.statvfs("/")
    if found.f_blocks * found.f_frsize < 20 * 2**30:
        pytest.skip("needs a disk of 20 GiB")
    held = DiskSpace(Path("/"), keep_free=0).bytes - DiskSpace(Path("/")).bytes
    assert held == pytest.approx(2**30, abs=2**28)  # others write meanwhile


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
