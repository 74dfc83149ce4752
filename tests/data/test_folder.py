from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.data.folder import FolderInProgress, check_target
from spatialdl.errors import ShardError


def data_set(folder: Path, *more: str) -> Path:
    folder.mkdir()
    for name in ("manifest.json", "shard-00000.h5", *more):
        (folder / name).write_text("old")
    return folder


def test_nothing_is_there_until_it_is_published(tmp_path: Path) -> None:
    folder = FolderInProgress(tmp_path / "deep" / "set")
    (folder.path / "manifest.json").write_text("new")
    assert not (tmp_path / "deep" / "set").exists()
    folder.publish()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["set"]
    assert (tmp_path / "deep" / "set" / "manifest.json").read_text() == "new"


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    folder = FolderInProgress(tmp_path / "set")
    (folder.path / "shard-00000.h5").write_text("half")
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_an_old_data_set_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    old = data_set(tmp_path / "set", "process_list.csv")
    (old / "pictures").mkdir()
    folder = FolderInProgress(old, overwrite=True)
    (folder.path / "manifest.json").write_text("new")
    assert (old / "manifest.json").read_text() == "old"
    folder.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert [path.name for path in old.iterdir()] == ["manifest.json"]


def test_a_failed_rename_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = data_set(tmp_path / "set")
    folder = FolderInProgress(old, overwrite=True)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk gone"):
        folder.publish()
    assert (old / "manifest.json").read_text() == "old"


def test_what_is_no_data_set_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(ShardError, match="is no data set"):
            check_target(tmp_path / "home", overwrite=overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match="is a file"):
        check_target(tmp_path / "file", overwrite=True)


def test_a_data_set_is_replaced_only_when_allowed(tmp_path: Path) -> None:
    old = data_set(tmp_path / "set")
    with pytest.raises(ShardError, match="--overwrite"):
        check_target(old, overwrite=False)
    check_target(old, overwrite=True)


def test_files_of_others_in_a_data_set_are_not_deleted(tmp_path: Path) -> None:
    old = data_set(tmp_path / "set", "notes.txt")
    with pytest.raises(ShardError, match=r"notes\.txt.*move it away"):
        check_target(old, overwrite=True)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    folder = FolderInProgress(tmp_path / "set")
    folder.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    FolderInProgress(tmp_path / "link").publish()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").is_dir()
