"""Batches that are interrupted or killed at every change of the disk, and gone on with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spatialdl.data.format import Manifest
from tests.slides.batch.batches import COORDS, WHOLE, contents, forked, leftovers, tile

TILES = ["--tile-size", "64", "--mpp", "0.5", "--shard-size", "128K"]
"""Slide a in two parts, slide b in one."""


CHANGES = (
    *((Path, name) for name in ("rename", "replace", "unlink", "rmdir")),
    *((os, "link"), (shutil, "rmtree")),
)


@dataclass
class Watched:
    """Ends the command after `left` changes of the disk, and sees which parts are cut."""

    cut: list[str]
    left: int = -1
    end: Callable[[], None] = lambda: None

    def change(self, done: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.end()
            return done(*arguments, **named)

        return counted


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, cut: list[str]) -> Watched:
    watched = Watched(cut)
    for owner, name in CHANGES:
        monkeypatch.setattr(owner, name, watched.change(getattr(owner, name)))
    return watched


def pressed() -> None:
    """The user presses Ctrl-C."""
    raise KeyboardInterrupt


def killed() -> None:
    """The process ends without another word."""
    os._exit(9)


def everywhere(
    watched: Watched,
    end: Callable[[], None],
    prepare: Callable[[], object],
    go: Callable[[], int],
    out: Path,
    changes: range,
) -> int:
    """Stop a batch at changes of the disk, go on, and compare with one left in peace.

    Returns the last change.
    """
    prepare()
    watched.cut.clear()
    assert go() == 0
    expected, parts = contents(out), sorted(watched.cut)
    for number in changes:
        shutil.rmtree(out)
        prepare()
        watched.cut.clear()
        watched.left, watched.end = number, end
        code, error = (go(), "") if end is pressed else forked(go)
        watched.left = -1
        if code == 0:  # there are no more changes
            return number - changes.step
        assert code == (130 if end is pressed else 9), error
        assert go() == 0, number
        assert contents(out) == expected, number
        assert leftovers(out.parent) == [], number
        if end is pressed:  # else they were cut in another process
            assert sorted(watched.cut) == parts, number
    raise AssertionError


@pytest.mark.parametrize(
    ("begun", "how", "end", "step"),
    [
        ("", TILES, killed, 9),
        ("labels", TILES, pressed, 9),
        *(
            pytest.param(begun, how, end, 1, marks=pytest.mark.slow)
            for begun, how, end in [
                *(("", TILES, pressed), ("", TILES, killed), ("", WHOLE, pressed)),
                *(("", COORDS, killed), ("slide", TILES, killed), ("labels", TILES, pressed)),
            ]
        ),
    ],
)
def test_a_batch_goes_on_wherever_it_was_stopped(tmp_path, small, watched, begun, how, end, step):
    """A new one, one more slide in a data set, or a data set of which the labels are others."""
    out, before, labels = tmp_path / "set", tmp_path / "before", tmp_path / "labels.csv"
    slides, more = [small], ["--labels", labels] if begun == "labels" else []
    labels.write_text("slide,label,split\na,x,train\nb,y,val\n")
    if begun:
        slides = [small / "b.tiff"] if begun == "slide" else slides
        assert tile(*slides, "--out", before, *how, *more) == 0
        slides = [small / "a.tiff"] if begun == "slide" else slides
    labels.write_text("slide,label,split\na,y,train\nb,x,val\n")

    def prepare() -> None:
        if begun:
            shutil.copytree(before, out)

    def go() -> int:
        return tile(*slides, "--out", out, *how, *more)

    last = everywhere(watched, end, prepare, go, out, range(1, 10_000, step))
    assert last > (25 if begun == "slide" else 20)
    if how is TILES:
        assert {sample.slide for sample in Manifest.load(out).samples} == {"a", "b"}
