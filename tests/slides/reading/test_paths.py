from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from spatialdl.slides.reading.paths import (
    series_at,
    slide_addresses,
    slide_aliases,
    slide_bytes,
    slide_files,
    slide_name,
    slide_path,
    slide_source,
    slides_among,
)
from spatialdl.slides.reading.reader import Slide
from tests.slides.dicom_series import uid, write_annotation, write_series
from tests.slides.tiled_tiffs import picture

A, B = uid("a"), uid("b")


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder with one series in it, and what is no slide."""
    folder = tmp_path / "case.1"
    write_series(folder, picture(300, 200), A)
    write_annotation(folder / "note.dcm", uid("note"))
    (folder / "notes.txt").touch()
    return folder


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder with two series in it."""
    folder = tmp_path / "both"
    write_series(folder, picture(300, 200), A, name="a{}.dcm")
    write_series(folder, picture(300, 200), B, 2, name="b{}.dcm")
    return folder


def test_a_series_alone_in_its_folder_is_the_folder(alone: Path) -> None:
    assert slides_among(alone, alone.iterdir()) == [alone]
    files = sorted(alone.glob("level-*"))
    assert {slide_path(file) for file in files} == {alone}
    assert list(slide_files(alone)) == files
    assert slide_bytes(alone) == sum(file.stat().st_size for file in files)
    assert slide_name(alone) == "case.1"
    assert list(slide_aliases(alone)) == ["case.1", A]
    assert slide_source(alone) == alone / A == slide_source(alone / A) == slide_source(files[0])
    assert slide_addresses(alone) == [alone, alone / A, *files]
    with Slide(alone) as slide:
        assert (slide.name, slide.size, slide.downsamples) == ("case.1", (300, 200), (1, 2, 4))
        assert slide.mpp == pytest.approx(0.5)


def test_series_beside_others_have_their_uid(both: Path) -> None:
    assert slides_among(both, both.iterdir()) == sorted([both / A, both / B])
    assert series_at(both) is None
    assert slide_path(both / "b1.dcm") == both / B
    assert list(slide_files(both / B)) == sorted(both.glob("b*"))
    assert slide_name(both / B) == B
    assert slide_source(both / "b0.dcm") == both / B
    assert both not in slide_addresses(both / B)
    with Slide(both / B) as slide:
        assert (slide.name, slide.downsamples) == (B, (1, 2))
    assert series_at(both / uid("c")) is None


def test_another_slide_beside_a_series_keeps_its_folder_from_being_one(alone: Path) -> None:
    (alone / "x.svs").touch()
    assert slides_among(alone, alone.iterdir()) == [alone / A, alone / "x.svs"]
    assert series_at(alone) is None


def test_a_damaged_file_is_a_slide_of_its_own(alone: Path) -> None:
    (alone / "damaged.dcm").write_bytes((alone / "level-0.dcm").read_bytes()[:300])
    assert slides_among(alone, alone.iterdir()) == [alone, alone / "damaged.dcm"]


def test_a_series_of_one_file_is_a_file_or_its_folder(tmp_path: Path) -> None:
    (file,) = write_series(tmp_path / "one", picture(300, 200), A, 1, label=False)
    assert slide_path(file) == file
    assert slide_name(file) == "level-0"
    assert list(slide_aliases(file)) == ["level-0", "level-0.dcm", A]
    assert slides_among(tmp_path / "one", [file]) == [tmp_path / "one"]
    assert slide_source(file) == slide_source(tmp_path / "one")
    (other,) = write_series(tmp_path / "one", picture(300, 200), B, 1, label=False, name="b{}.dcm")
    assert slides_among(tmp_path / "one", [file, other]) == sorted([file, other])


def test_the_folder_in_which_one_is_has_its_name(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(alone)
    assert slide_name(Path()) == "case.1"
    assert slide_source(Path("level-1.dcm")) == alone / A


def test_a_folder_is_read_again_once_it_has_changed(alone: Path) -> None:
    long_ago = time.time() - 1000
    os.utime(alone, (long_ago, long_ago))
    for _ in range(2):
        assert slide_name(slide_path(alone / "level-0.dcm")) == "case.1"
    write_series(alone, picture(300, 200), B, name="b{}.dcm")
    assert slide_path(alone / "level-0.dcm") == alone / A
    os.utime(alone, (long_ago + 1, long_ago + 1))
    assert [slide_name(slide_path(alone / f"{k}0.dcm")) for k in ("level-", "b")] == [A, B]


def test_other_files_are_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    assert (slide_path(path), slide_files(path), slide_source(path)) == (path, (path,), path)
    assert (list(slide_aliases(path)), slide_addresses(path)) == (["a", "a.svs"], [path])
    assert slide_name(Path("...")) == "..."
