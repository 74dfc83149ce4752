"""Folders and files that appear when they are whole, belong to nobody else, and are striped."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spatialdl.common.files import (
    FileLock,
    apply_umask,
    check_own,
    file_status,
    is_locked,
    load_json,
    replacing,
    unfinished,
)
from spatialdl.data.folder import FolderInProgress, ResumableFolder, check_target
from spatialdl.data.options import stripe_files
from spatialdl.errors import ShardError

NOT_OURS = "not a folder owned by this user"
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")


def data_set(folder: Path, *more: str) -> Path:
    folder.mkdir()
    for name in ("manifest.json", "shard-00000.h5", *more):
        (folder / name).write_text("old")
    return folder


def inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "error"), [(FolderInProgress, OSError("gone")), (ResumableFolder, KeyboardInterrupt())]
)
def test_a_failed_rename_brings_the_old_one_back(tmp_path, monkeypatch, kind, error) -> None:
    old = data_set(tmp_path / "set")
    folder = kind(old, overwrite=True)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial" in self.name:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(type(error)):
        folder.publish()
    assert (old / "manifest.json").read_text() == "old"


def test_what_may_not_be_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "lock").write_text("of a door")
    (tmp_path / "file").touch()
    old, others = data_set(tmp_path / "set"), data_set(tmp_path / "others", "notes.txt")
    for target, overwrite, says in [
        (tmp_path / "home", False, "is not a data set"),
        (tmp_path / "home", True, "is not a data set"),
        (tmp_path / "file", True, "is a file"),
        (Path("/proc"), True, "is a mount point"),
        (old, False, "--overwrite"),
        (others, True, r"notes\.txt.*move it away"),
    ]:
        for check in (check_target, FolderInProgress, ResumableFolder):
            with pytest.raises(ShardError, match=f"{says}|cannot write beside"):
                check(target, overwrite=overwrite)
    for target in (tmp_path / "file" / "set", Path("/proc/set")):
        with pytest.raises(ShardError, match="cannot write beside"):
            ResumableFolder(target, overwrite=True)
    check_target(old, overwrite=True)
    assert (tmp_path / "home" / "lock").read_text() == "of a door"
    assert inside(tmp_path) == ["file", "home", "others", "set"]


def test_an_empty_folder_is_taken_and_a_link_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    FolderInProgress(tmp_path / "link").publish()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").is_dir()
    assert inside(tmp_path) == ["link", "real"]


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


def begun(target: Path, name: str = "shard-00000.h5", **more: object) -> ResumableFolder:
    folder = ResumableFolder(target, **more)
    (folder.path / name).write_text("new")
    return folder


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
    folder = begun(old, "manifest.json", settings={"mpp": 0.5})
    assert folder.before == old
    folder.publish()
    assert (inside(tmp_path), inside(old)) == (["set"], ["manifest.json"])


@pytest.mark.parametrize(("at", "empty"), [(1, False), (2, False), (2, True)])
def test_a_kill_while_the_folder_gets_its_name(tmp_path, monkeypatch, at: int, empty: bool) -> None:
    old = data_set(tmp_path / "set")
    rename = Path.rename

    def work() -> None:
        names = iter(range(1, 9))
        folder = begun(old, "manifest.json", overwrite=True)
        monkeypatch.setattr(
            Path, "rename", lambda *given: die() if next(names) == at else rename(*given)
        )
        folder.publish()

    killed(work)
    assert old.exists() == (at == 1)
    if empty:  # a script has made it, as it does before every run
        old.mkdir()
    folder = ResumableFolder(old, overwrite=True)
    assert (old / "manifest.json").read_text() == "old"
    assert inside(tmp_path) == [".set.partial", "set"]
    assert (folder.path / "manifest.json").read_text() == "new"
    folder.publish()
    assert (old / "manifest.json").read_text() == "new"
    assert inside(tmp_path) == ["set"]


@pytest.mark.parametrize("at", ["shutil.rmtree", "pathlib.Path.unlink"])
def test_a_kill_after_the_folder_got_its_name(tmp_path: Path, monkeypatch, at: str) -> None:
    old = data_set(tmp_path / "set")

    def work() -> None:
        folder = begun(old, "manifest.json", overwrite=True)
        monkeypatch.setattr(at, die)
        folder.publish()

    killed(work)
    ResumableFolder(old, overwrite=True).leave()
    assert (inside(tmp_path), inside(old)) == (["set"], ["manifest.json"])
    assert (old / "manifest.json").read_text() == "new"


@only_root
def test_what_somebody_else_has_put_under_its_names_is_not_used(tmp_path: Path) -> None:
    elsewhere, hidden, target = tmp_path / "elsewhere", tmp_path / ".set.partial", tmp_path / "set"
    elsewhere.mkdir()
    hidden.symlink_to(elsewhere)
    with pytest.raises(ShardError, match=NOT_OURS):
        ResumableFolder(target)
    hidden.unlink()
    for name in (hidden, tmp_path / ".set.old"):
        data_set(name)
        os.chown(name, 12345, -1)
        with pytest.raises(ShardError, match=NOT_OURS):
            ResumableFolder(target)
        os.rename(name, tmp_path / f"{name.name}.moved")
    assert list(elsewhere.iterdir()) == []
    theirs = tmp_path / ".set.partial-0"
    theirs.mkdir()
    os.mkfifo(theirs / "lock")  # reading it waits for ever
    os.chown(theirs, 12345, -1)
    FolderInProgress(target).discard()
    assert theirs.is_dir()
    with pytest.raises(ShardError, match=NOT_OURS):
        check_own(theirs)


def test_a_folder_of_this_user(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file").touch()
    assert check_own(tmp_path / "own") == 0o700
    for name in ("link", "file"):
        with pytest.raises(ShardError, match=NOT_OURS):
            check_own(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        check_own(tmp_path / "none")


def test_files_that_lead_elsewhere_or_never_end_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "a").write_bytes(b"123")
    (folder / "near").symlink_to("a")
    (tmp_path / "way").symlink_to(folder)
    for root in (folder, tmp_path / "way"):
        assert file_status(root, "a").st_size == file_status(root, "near").st_size == 3
    with pytest.raises(FileNotFoundError):
        file_status(folder, "b")
    (tmp_path / "outside").touch()
    (folder / "link").symlink_to("../outside")
    (folder / "again").symlink_to("link")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    for name, says in [
        *((name, "link out of its folder") for name in ("link", "again")),
        *((name, "is not a regular file|link out of") for name in ("pipe", "zero", ".")),
    ]:
        with pytest.raises(ValueError, match=says):
            file_status(folder, name)


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".csv")  # as long as names may be
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"

    def stop_half_way() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert path.read_bytes() == b"new"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # the last to end
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def usual(tmp_path: Path) -> Iterator[int]:
    """The mode of new files with a umask of 0."""
    before = os.umask(0)
    other = tmp_path / "other"
    other.touch()
    yield other.stat().st_mode
    os.umask(before)


def test_nobody_else_sees_what_is_not_finished(tmp_path: Path, usual: int) -> None:
    for name, write in (("a", replacing), ("b", unfinished)):
        before = set(tmp_path.iterdir())
        with write(tmp_path / name) as made:
            (temporary,) = set(tmp_path.iterdir()) - before
            assert temporary.stat().st_mode & 0o777 == 0o600
            made.write(b"secret") if name == "a" else made.write_bytes(b"secret")
        assert (tmp_path / name).read_bytes() == b"secret"
        assert (tmp_path / name).stat().st_mode == usual
    assert inside(tmp_path) == ["a", "b", "other"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("tells", [True, False])
def test_what_is_shown_leaves_nothing_beside_it_and_no_umask_changed(
    tmp_path: Path, umask: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C once left the empty file there that had been made to see what mode it gets."""
    before = os.umask(umask)
    try:
        if not tells:  # no Linux
            monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: python")
        path, folder = tmp_path / "a", tmp_path / "mine"
        path.touch(mode=0o600)
        folder.mkdir()
        folder.chmod(0o2700)  # it still belongs to its group
        apply_umask(path)
        apply_umask(folder)
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        assert folder.stat().st_mode & 0o7777 == 0o2000 | 0o777 & ~umask
        assert os.umask(umask) == umask
        assert inside(tmp_path) == ["a", "mine"]
    finally:
        os.umask(before)


def test_a_lock_is_of_the_file_that_has_the_name(tmp_path, monkeypatch) -> None:
    path, flock = tmp_path / "lock", fcntl.flock

    def replaced(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if path.read_text() == "old":
            path.unlink()
            path.write_text("new")

    path.write_text("old")
    monkeypatch.setattr(fcntl, "flock", replaced)
    with FileLock(path) as lock:
        assert os.pread(lock.descriptor, 9, 0) == b"new"
        lock.write("a")
        assert is_locked(path)
        with pytest.raises(BlockingIOError):
            FileLock(path)
    assert (is_locked(path), is_locked(tmp_path / "none"), path.read_text()) == (False, False, "a")

    def lacking(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", lacking)
    with pytest.raises(OSError, match="no locks"):
        FileLock(path)
    with pytest.warns(UserWarning, match="does not support locks"):
        FileLock(path, optional=True).close()


def test_what_is_no_json_is_as_if_it_were_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert load_json(path) is None
    for text, found in (('{"a": 1}', {"a": 1}), ("{", None), ("[" * 100_000, None)):
        path.write_text(text)
        assert load_json(path) == found


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that records its arguments."""
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    said = tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {said}\n'
        '[ "$3" != 77 ] || { printf "lfs: bad  stripe\ncount \\377" >&2; exit 22; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return said


def test_a_folder_on_lustre_is_laid_out(tmp_path: Path, lfs: Path, monkeypatch) -> None:
    for count, size, asked in [
        (4, 2**22, f"setstripe -c 4 -S 4194304 {tmp_path}\n"),
        (-1, None, f"setstripe -c -1 {tmp_path}\n"),
        (None, 2**16, f"setstripe -S 65536 {tmp_path}\n"),
    ]:
        assert stripe_files(tmp_path, count, size) == ""
        assert lfs.read_text() == asked
        lfs.unlink()
    assert stripe_files(tmp_path, None, None) == ""
    assert not lfs.exists()
    with pytest.raises(ShardError, match=r"-c 77 .* failed: lfs: bad stripe count \ufffd"):
        stripe_files(tmp_path, 77, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "stripes were not set: lfs" in stripe_files(tmp_path, 4, None)
