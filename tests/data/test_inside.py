from __future__ import annotations

import os

import pytest

from spatialdl.data.inside import check_own, file_status
from spatialdl.errors import ShardError


def test_files_and_links_of_the_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").symlink_to(tmp_path)
    assert file_status(tmp_path, "a").st_size == 3
    assert file_status(tmp_path, "link").st_size == 3
    assert file_status(tmp_path / "folder", "link").st_size == 3
    with pytest.raises(FileNotFoundError):
        file_status(tmp_path, "b")


def test_what_leads_elsewhere_or_never_ends_is_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside").touch()
    (inside / "link").symlink_to("../outside")
    (inside / "again").symlink_to("link")
    os.mkfifo(inside / "pipe")
    for name in ("link", "again"):
        with pytest.raises(ValueError, match="link out of its folder"):
            file_status(inside, name)
    (inside / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(ValueError, match=r"is not a regular file|link out of"):
            file_status(inside, name)


def test_a_folder_of_this_user(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file").touch()
    assert check_own(tmp_path / "own") == 0o700
    for name in ("link", "file"):
        with pytest.raises(ShardError, match="not a folder owned by this user"):
            check_own(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        check_own(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_somebody_else(tmp_path):
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ShardError, match="not a folder owned by this user"):
        check_own(tmp_path)
