from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spatialdl.data.saving import apply_umask, link, load_json, replacing, unfinished


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".csv")  # as long as names may be
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def usual(tmp_path: Path) -> Iterator[int]:
    """The mode of new files with a umask of 0."""
    before = os.umask(0)
    other = tmp_path / "other"
    other.touch()
    yield other.stat().st_mode
    os.umask(before)


def private(folder: Path) -> bool:
    """Whether what was added to the folder is the user's alone."""
    (temporary,) = set(folder.iterdir()) - {folder / "other"}
    return temporary.stat().st_mode & 0o777 == 0o600


def test_nobody_else_sees_what_is_not_finished(tmp_path: Path, usual: int) -> None:
    path = tmp_path / "a"
    with replacing(path) as file:
        file.write(b"secret")
        assert private(tmp_path)
    assert path.stat().st_mode == usual


def test_what_others_write_by_its_name_is_not_seen_either(tmp_path: Path, usual: int) -> None:
    path = tmp_path / "a"
    with unfinished(path) as temporary:
        temporary.write_bytes(b"secret")
        assert private(tmp_path)
    assert path.read_bytes() == b"secret"
    assert path.stat().st_mode == usual
    assert {one.name for one in tmp_path.iterdir()} == {"a", "other"}


def test_a_folder_is_shown_as_any_other(tmp_path: Path, usual: int) -> None:
    folder, other = tmp_path / "mine", tmp_path / "yours"
    folder.mkdir(mode=0o700)
    other.mkdir()
    apply_umask(folder)
    assert folder.stat().st_mode == other.stat().st_mode
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "other", "yours"]


def test_a_shown_folder_still_belongs_to_its_group(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o2700)
    apply_umask(folder)
    assert folder.stat().st_mode & 0o7700 == 0o2700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_what_is_shown_leaves_nothing_beside_it_and_no_umask_changed(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C once left the empty file there that had been made to see what mode it gets."""
    before = os.umask(umask)
    try:
        for tells in ("Linux", "another"):
            if tells == "another":
                monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: python")
            path = tmp_path / tells
            path.touch(mode=0o600)
            apply_umask(path)
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_a_second_name_is_a_copy_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    link(source, target)
    assert target.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"old")

    def stop_half_way() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_may_write_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # the last to end
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_json_is_as_if_it_were_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert load_json(path) is None
    for text, found in (('{"a": 1}', {"a": 1}), ("{", None), ("[" * 100_000, None)):
        path.write_text(text)
        assert load_json(path) == found
