from __future__ import annotations

import os
from pathlib import Path

import pytest

from spatialdl.data.saving import load_json, replacing


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".csv")  # as long as names may be
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_nobody_else_sees_what_is_not_finished(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    before = os.umask(0)
    try:
        other.touch()
        with replacing(path) as file:
            file.write(b"secret")
            (temporary,) = set(tmp_path.iterdir()) - {other}
            assert temporary.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_mode == other.stat().st_mode
    finally:
        os.umask(before)


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
