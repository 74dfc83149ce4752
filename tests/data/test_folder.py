from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spatialdl.data.folder import FolderInProgress, ResumableFolder, check_target
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
        with pytest.raises(ShardError, match="is not a data set"):
            check_target(tmp_path / "home", overwrite=overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match="is a file"):
        check_target(tmp_path / "file", overwrite=True)


def test_a_mount_point_is_refused_before_any_work() -> None:
    with pytest.raises(ShardError, match="is a mount point"):
        check_target(Path("/proc"), overwrite=True)


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


def killed(work: Callable[[], object]) -> None:
    """Do something in a process that is killed where it calls `die`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)  # never reached
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_an_interrupted_run_has_done_is_found_again(tmp_path: Path) -> None:
    folder = ResumableFolder(tmp_path / "set")
    (folder.path / "shard-00000.h5").write_text("done")
    folder.leave()
    assert not (tmp_path / "set").exists()
    folder = ResumableFolder(tmp_path / "set")
    assert (folder.path / "shard-00000.h5").read_text() == "done"
    folder.publish()
    folder.leave()
    assert inside(tmp_path) == ["set"]
    assert inside(tmp_path / "set") == ["shard-00000.h5"]


def test_a_run_that_has_done_nothing_leaves_nothing(tmp_path: Path) -> None:
    ResumableFolder(tmp_path / "set").leave()
    assert inside(tmp_path) == []
    folder = ResumableFolder(tmp_path / "set")
    (folder.path / "shard-00000.h5").write_text("done")
    folder.discard()
    folder.leave()
    assert inside(tmp_path) == []


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    folder = ResumableFolder(tmp_path / "set")
    (folder.path / "shard-00000.h5").write_text("done")
    with pytest.raises(ShardError, match=rf"set is being written by process {os.getpid()} on \w"):
        ResumableFolder(tmp_path / "set")
    assert inside(folder.path) == ["lock", "shard-00000.h5"]
    folder.leave()
    ResumableFolder(tmp_path / "set").discard()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    def work() -> None:
        (ResumableFolder(tmp_path / "set").path / "shard-00000.h5").write_text("done")
        die()

    killed(work)
    folder = ResumableFolder(tmp_path / "set")
    assert inside(folder.path) == ["lock", "shard-00000.h5"]
    folder.discard()


def test_a_data_set_of_the_same_settings_is_added_to(tmp_path: Path) -> None:
    old = data_set(tmp_path / "set")
    (old / "settings.json").write_text('{"mpp": 0.5}')
    for settings in ({"mpp": 1.0}, None):
        with pytest.raises(ShardError, match="--overwrite"):
            ResumableFolder(old, settings=settings)
        assert inside(tmp_path) == ["set"]
    folder = ResumableFolder(old, overwrite=True, settings={"mpp": 0.5})
    assert folder.before is None
    folder.leave()
    folder = ResumableFolder(old, settings={"mpp": 0.5})
    assert folder.before == old
    (folder.path / "manifest.json").write_text("new")
    folder.publish()
    assert inside(old) == ["manifest.json"]
    assert inside(tmp_path) == ["set"]


def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "lock").write_text("of a door")
    with pytest.raises(ShardError, match="is not a data set"):
        ResumableFolder(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "lock").read_text() == "of a door"
    assert inside(tmp_path) == ["home"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "set", Path("/proc/set")):
        with pytest.raises(ShardError, match="cannot write beside"):
            ResumableFolder(target)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("empty", [False, True])
def test_a_kill_while_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, empty: bool
) -> None:
    old = data_set(tmp_path / "set")
    rename = Path.rename

    def work() -> None:
        names = iter(range(1, 9))

        def until(self: Path, target: Path) -> Path:
            return die() if next(names) == at else rename(self, target)  # type: ignore[return-value]

        folder = ResumableFolder(old, overwrite=True)
        (folder.path / "manifest.json").write_text("new")
        monkeypatch.setattr(Path, "rename", until)
        folder.publish()

    killed(work)
    assert old.exists() == (at == 1)
    if empty and at == 2:  # a script has made it, as it does before every run
        old.mkdir()
    folder = ResumableFolder(old, overwrite=True)
    assert (old / "manifest.json").read_text() == "old"
    assert inside(tmp_path) == [".set.partial", "set"]
    assert (folder.path / "manifest.json").read_text() == "new"
    folder.publish()
    assert (old / "manifest.json").read_text() == "new"
    assert inside(tmp_path) == ["set"]


@pytest.mark.parametrize("at", ["shutil.rmtree", "pathlib.Path.unlink"])
def test_a_kill_after_the_folder_got_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    old = data_set(tmp_path / "set")

    def work() -> None:
        folder = ResumableFolder(old, overwrite=True)
        (folder.path / "manifest.json").write_text("new")
        monkeypatch.setattr(at, die)
        folder.publish()

    killed(work)
    ResumableFolder(old, overwrite=True).leave()
    assert inside(tmp_path) == ["set"]
    assert inside(old) == ["manifest.json"]
    assert (old / "manifest.json").read_text() == "new"


def test_ctrl_c_between_the_two_names_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = data_set(tmp_path / "set")
    folder = ResumableFolder(old, overwrite=True)
    rename = Path.rename

    def pressed(self: Path, target: Path) -> Path:
        if self.name == ".set.partial":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", pressed)
    with pytest.raises(KeyboardInterrupt):
        folder.publish()
    assert (old / "manifest.json").read_text() == "old"
    folder.leave()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_what_somebody_else_has_put_under_its_names_is_not_used(tmp_path: Path) -> None:
    elsewhere, hidden = tmp_path / "elsewhere", tmp_path / ".set.partial"
    elsewhere.mkdir()
    hidden.symlink_to(elsewhere)
    with pytest.raises(ShardError, match="not a folder owned by this user"):
        ResumableFolder(tmp_path / "set")
    hidden.unlink()
    hidden.mkdir()
    os.chown(hidden, 12345, -1)
    with pytest.raises(ShardError, match="not a folder owned by this user"):
        ResumableFolder(tmp_path / "set")
    hidden.rmdir()
    old = data_set(tmp_path / ".set.old")
    os.chown(old, 12345, -1)
    with pytest.raises(ShardError, match="not a folder owned by this user"):
        ResumableFolder(tmp_path / "set")
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".set.old", "elsewhere"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_what_somebody_else_has_abandoned_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / ".set.partial-0"
    theirs.mkdir()
    os.mkfifo(theirs / "lock")  # reading it waits for ever
    os.chown(theirs, 12345, -1)
    FolderInProgress(tmp_path / "set").discard()
    assert theirs.is_dir()
