"""Whether trouble is noticed at all."""

from __future__ import annotations

from functools import partial

import pytest

from tests.fuzzing.child import Child


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.setenv("FUZZING_CPU_LIMIT_S", "1")
    (tmp_path / "secret").touch()
    with Child(tmp_path / "inputs") as made:
        yield partial(made.attempt, "misbehaving", 0)


def test_what_a_reader_does_is_noticed(child, tmp_path):
    assert child(b"read") == ("read", "")
    assert child(b"remove inside") == ("read", "")
    assert child(b"clean") == ("refused", "ValueError: a.txt")
    for bad, said in (
        (b"unnamed", "does not say which file"),
        (b"key", "KeyError"),
        (b"eat", "MemoryError"),
        (b"write", "open writes"),
        (b"look", "open reads"),
        (b"unpickle", "pickle.find_class"),
        (b"start", "subprocess.Popen"),
        (b"rename", "os.rename writes"),
    ):
        kind, text = child(bad)
        assert (kind, said in text) == ("wrong", True), text
    assert child(b"read").clean


def test_a_reader_that_dies_or_never_ends_takes_nobody_with_it(child):
    for bad, kind, said in (
        (b"crash", "crash", "Segmentation fault"),
        (b"spin", "hang", "in attempt"),
    ):
        outcome = child(bad)
        assert outcome.kind == kind
        assert said in outcome.said
        assert not outcome.clean
        assert child(b"read").clean
