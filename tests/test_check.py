"""How the checking command is started and refuses; tests/mpi/checking has what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spatialdl import check as command

ROOT = Path(__file__).parents[1]
NETWORKS = "tests.spatial.checking.user_networks"


@pytest.fixture
def check(monkeypatch, capfd):
    """Runs the command in this process; its exit code, or error, and what it prints."""
    monkeypatch.chdir(ROOT)

    def run(*words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["check", *words])
        with pytest.raises(SystemExit) as stop:
            command.main()
        captured = capfd.readouterr()
        return stop.value.code, captured.out + captured.err

    return run


def test_it_starts_its_ranks(check):
    code, said = check(f"{NETWORKS}.Exact", "--size", "21x18", "--grid", "1x2")
    assert (code, said.splitlines()[-1]) == (0, "exact"), said
    assert "on 1x2 ranks" in said.splitlines()[0]


@pytest.mark.parametrize(
    ("answer", "of_ranks", "code"), [("exact", 0, 0), ("exact", 1, 1), ("not exact", 0, 1)]
)
def test_it_ends_as_its_ranks_answer(answer, of_ranks, code, check, monkeypatch):
    def start_ranks(ranks: int, module: str, words: list[str]) -> int:
        Path(words[words.index("--answer") + 1]).write_text(answer)
        return of_ranks

    monkeypatch.setattr(command, "start_ranks", start_ranks)
    assert check(f"{NETWORKS}.Exact", "--size", "21x18", "--grid", "1x2")[0] == code


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("no_package.build", (), "cannot import no_package.build: No module named"),
        (f"{NETWORKS}.absent", (), f"cannot import {NETWORKS}.absent: "),
        ("absent.py:build", (), "file absent.py does not exist"),
        ("tests/spatial/checking/user_networks.py:absent", (), "user_networks.py has no absent"),
        (f"{NETWORKS}.thing", (), "is an int, not a function that returns the network"),
        (f"{NETWORKS}.number", (), "returned an int, not a torch.nn.Module"),
        (f"{NETWORKS}.needs", (), "missing 1 required positional argument: 'width'; pass"),
        (f"{NETWORKS}.needs", ("size=3",), "got an unexpected keyword argument 'size'"),
        (f"{NETWORKS}.named", ("in_channels=4",), "images (2, 4, 21, 18)"),
        (f"{NETWORKS}.named", ("in_channels=4", "--channels", "5"), "images (2, 5, 21, 18)"),
        (f"{NETWORKS}.needs", ("3",), "3 is not key=value, an argument of the function"),
        (f"{NETWORKS}.Noise", (), "results of a single process vary between runs"),
        (f"{NETWORKS}.Exact", ("--channels", "4"), "images (2, 4, 21, 18) "),
        (f"{NETWORKS}.Exact", ("--grid", "30x1"), "of 21x18 is smaller than the grid 30x1"),
        (f"{NETWORKS}.Exact", ("--grid", "2x1x1"), "an image of 21x18 has 2 dims, but the grid"),
    ],
)
def test_mistakes_are_told_before_ranks_start(name, options, sentence, check, monkeypatch):
    monkeypatch.setattr(command, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    said, _ = check(name, "--size", "21x18", "--grid", "2x1", *options)
    assert str(said).startswith("error: ")
    assert len(str(said).splitlines()) == 1
    assert sentence in str(said)


@pytest.mark.parametrize("size", ["96x", "0x8", "axb", "2x2x2x2"])
def test_what_is_no_size(size, check):
    code, said = check("nets.build", "--size", size, "--grid", "2x1")
    assert code == 2
    assert f"{size} must be one to three positive numbers" in said
